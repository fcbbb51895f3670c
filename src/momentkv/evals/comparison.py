"""Variants against each other on the same samples: means, intervals, and the difference to the strongest baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from momentkv.evals.results import Entry
from momentkv.evals.statistics import Array, bootstrap, interval, weighted_means

TOLERANCE = 1.005  # a baseline may hold this much of a variant's bytes


@dataclass(frozen=True)
class Compared:
    """Figures of one variant. interval: 95 %, None where a stratum has a single sample. baseline: the strongest plain
    variant, and the difference to it; None where there is none."""

    value: float
    interval: tuple[float, float] | None
    baseline: Entry | None = None
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None


def strongest(index: int, entries: Sequence[Entry], values: Array, nbytes: Sequence[float], higher: bool) -> int | None:
    """The best plain variant of the same level, other than `index` itself, that holds no more bytes."""
    entry = entries[index]
    rivals = [
        i
        for i, other in enumerate(entries)
        if i != index and other.plain and other.level == entry.level and nbytes[i] <= nbytes[index] * TOLERANCE
    ]
    return max(rivals, key=lambda i: values[i] if higher else -values[i], default=None)


def compare(
    entries: Sequence[Entry], strata: Sequence[tuple[float, Array]], nbytes: Sequence[float], higher: bool
) -> list[Compared]:
    """Every variant's figures.

    Args:
        entries: k variants. strata: weights and `[k, n]` figures of the same n samples, see `bootstrap`.
        nbytes: what each variant holds. higher: whether more is better.
    """
    values, draws = weighted_means(strata), bootstrap(strata)
    known = all(x.shape[1] > 1 for _, x in strata)

    def ends(drawn: Array) -> tuple[float, float] | None:
        low, high = interval(drawn)
        return (float(low), float(high)) if known else None

    found = []
    for i in range(len(entries)):
        rival = None if entries[i].group == 0 else strongest(i, entries, values, nbytes, higher)
        own = ends(draws[:, i])
        if rival is None:
            found.append(Compared(float(values[i]), own))
        else:
            gap = ends(np.subtract(draws[:, i], draws[:, rival]))
            found.append(Compared(float(values[i]), own, entries[rival], float(values[i] - values[rival]), gap))
    return found
