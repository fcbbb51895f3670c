"""What eviction loses in every layer of a real model, on the queries of what follows a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from momentkv.analysis.gaps import Gaps, check_identities, gaps_of
from momentkv.correction import estimate
from momentkv.evals.attention_error import kept_mask
from momentkv.evals.output_error import exact_output
from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.follow import Follow, follow
from momentkv.hf.layer import MomentLayer
from momentkv.hf.prefill import Prefill, prefill
from momentkv.layer import LayerState
from momentkv.policies.base import Evidence
from momentkv.settings import Settings
from momentkv.state import AttnState, empty_like, merge


class Choice(NamedTuple):
    """method: METHOD or METHOD:PRESET. budget: as `MomentCache` takes it, in text."""

    method: str
    budget: str


@dataclass(frozen=True)
class Read:
    """A prompt and what follows it, both read with exact attention, for one row."""

    exact: Prefill
    after: Follow


@dataclass(frozen=True)
class Probe(Gaps):
    """One choice on one text: all `[layers, h, g, q]`, on the host.

    corrected: relative error of the output with the correction of the method; without one the same as `error`.
    estimate_cosine: between `f_E` and its estimate; 0 without one.
    tokens: mean tokens per head that the cache holds. residual: the largest of Eqs. 2-4. layers: their indices.
    """

    corrected: Tensor
    estimate_cosine: Tensor
    tokens: float
    residual: float
    layers: tuple[int, ...]


QUANTITIES = ("weight", "cosine", "gamma", "error", "parallel", "across", "corrected", "estimate_cosine")


def check_choices(model: Any, choices: Sequence[Choice]) -> None:
    """Raise the ValueError of `MomentCache` for a method or budget that cannot be, before anything is read."""
    for choice in choices:
        MomentCache(model.config, choice.budget, choice.method)


@torch.no_grad()
def read(model: Any, prompt: Sequence[int], rest: Sequence[int], mass: bool = True) -> Read:
    """Read a prompt once and its continuation after it. mass: also what H2O needs. Default True."""
    with attend(model):
        exact = prefill(model, torch.tensor([list(prompt)], device=model.device), mass=mass)
        return Read(exact, follow(model, exact, torch.tensor([list(rest)], device=model.device)))


def precise(e: Evidence) -> Evidence:
    """With queries in fp64, so that all that is attended with them is; fp32 where a device has no fp64."""
    return e if e.queries.device.type == "mps" else replace(e, queries=e.queries.double())


def parts(e: Evidence, state: LayerState, prompt: int) -> tuple[AttnState, AttnState]:
    """Exact states of the retained and the evicted tokens of a prompt, all that follows it being retained.

    Args:
        e: prompt and continuation of one row, with the queries of the continuation. prompt: its tokens.
    """
    retained = e.valid.clone()
    retained[..., :prompt] &= kept_mask(state, prompt)
    return exact_output(replace(e, valid=retained)), exact_output(replace(e, valid=e.valid & ~retained))


def _layer(e: Evidence, full: AttnState, state: LayerState, settings: Settings, prompt: int, what: str) -> dict:
    kept, lost = parts(e, state, prompt)
    residual = check_identities(kept, lost, full, what)
    estimated = empty_like(lost)
    if settings.correction != "off":
        estimated = estimate(e.queries, state.moments(settings), settings.correction, settings.mass)
    wrong = merge(kept, estimated).out - full.out
    found = gaps_of(kept, lost, full)
    return {
        **{f.name: getattr(found, f.name) for f in fields(Gaps)},
        "corrected": wrong.norm(dim=-1) / full.out.norm(dim=-1).clamp(min=1e-30),
        "estimate_cosine": cosine_similarity(lost.out, estimated.out.to(lost.out.dtype), dim=-1),
        "residual": residual,
    }


@torch.no_grad()
def probe(text: Read, choices: Sequence[Choice]) -> list[Probe]:
    """Compress the prompt by each choice and attend with the queries of the continuation, as if no more were evicted.

    The layers are taken one after the other: beside the text's own keys and values only one layer's states and
    the compressed caches are alive, in fp64.

    Raises:
        FloatingPointError: an identity of docs/math.md, section 2 does not hold (see `check_identities`).
    """
    caches = [text.exact.compress(budget, method) for method, budget in choices]
    rows: list[list[dict[str, Any]]] = [[] for _ in choices]
    for index, evidence in text.after.layers:
        e = precise(evidence)
        full = exact_output(e)
        for cache, choice, own in zip(caches, choices, rows, strict=True):
            layer = cache.layers[index]
            assert isinstance(layer, MomentLayer) and layer.state is not None
            what = f"{choice.method}, budget {choice.budget}, layer {index}"
            own.append(_layer(e, full, layer.state, layer.plan.settings, text.exact.tokens, what))
    indices = tuple(index for index, _ in text.after.layers)
    return [
        Probe(
            **{name: torch.stack([row[name][0] for row in own]).cpu() for name in QUANTITIES},
            tokens=cache.report().tokens_per_head,
            residual=max(row["residual"] for row in own),
            layers=indices,
        )
        for cache, own in zip(caches, rows, strict=True)
    ]
