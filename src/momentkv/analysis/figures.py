"""What the figures share: means with quartiles, their CSV, and the words of a caption."""

import csv
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from momentkv.analysis.draw import Line
from momentkv.analysis.probe import QUANTITIES, Probe

# The quantities of a CSV in an axis' words.
AXES = {
    "weight": r"evicted weight $w_E$",
    "cosine": r"$\cos(f_E, f_R)$",
    "gamma": r"$\gamma = |f_E - f_R|\,/\,|f|$",
    "error": r"relative error $|f - f_R|\,/\,|f|$",
    "corrected": r"relative error $|\hat f - f|\,/\,|f|$",
    "estimate_cosine": r"$\cos(f_E, \hat f_E)$",
}


class Spread(NamedTuple):
    """Mean and quartiles of `cells` values."""

    mean: float
    low: float
    high: float
    cells: int


OF_EVICTED = ("cosine", "gamma", "estimate_cosine")
SPREAD = ("mean", "quartile_1", "quartile_3", "cells")  # its columns in a CSV


def spread(x: Tensor) -> Spread:
    """Of all entries that are numbers, in fp64; NaN where there are none."""
    values = x[~x.isnan()].double().numpy()
    if not values.size:
        return Spread(math.nan, math.nan, math.nan, 0)
    low, high = np.quantile(values, (0.25, 0.75))
    return Spread(float(values.mean()), float(low), float(high), values.size)


def _defined(p: Probe, quantity: str) -> Tensor:
    """NaN where the quantity says something of `f_E` and nothing is evicted."""
    x = getattr(p, quantity)
    return x.masked_fill(p.weight == 0, math.nan) if quantity in OF_EVICTED else x


def overall(p: Probe, quantity: str) -> Spread:
    """Over layers, heads and queries."""
    return spread(_defined(p, quantity))


def by_layer(p: Probe, quantity: str) -> list[Spread]:
    """Over heads and queries."""
    return [spread(x) for x in _defined(p, quantity)]


def pooled(probes: Sequence[Probe]) -> Probe:
    """One choice over several texts: their queries side by side; `residual` is the largest, `tokens` the mean."""
    both: dict[str, Any] = {name: torch.cat([getattr(p, name) for p in probes], dim=-1) for name in QUANTITIES}
    tokens = sum(p.tokens for p in probes) / len(probes)
    return replace(probes[0], **both, tokens=tokens, residual=max(p.residual for p in probes))


def line(name: str, x: Sequence[float], found: Sequence[Spread], style: int = 0, band: bool = True) -> Line:
    """Means, with the interquartile band or without."""
    low, high = ([s.low for s in found], [s.high for s in found]) if band else (None, None)
    return Line(name, x, [s.mean for s in found], low, high, style=style)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    """Floats as Python prints them: read back they are the same."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(header)
        out.writerows(rows)
    return path


def model_name(args: Namespace) -> str:
    """The model without the folder that it is in."""
    return Path(args.model).name or args.model


def one_budget(args: Namespace) -> str:
    """That of `--budgets`, or the paper's 128."""
    budgets = args.budgets or ["128"]
    if len(budgets) > 1:
        raise ValueError(f"--budgets {','.join(budgets)}: figure {args.figure} takes one budget")
    return budgets[0]


def counts(p: Probe) -> str:
    """What a probe's means are over, in words."""
    layers, heads, groups, queries = p.error.shape
    return f"{layers} layers, {heads * groups} query heads and {queries:,} queries"
