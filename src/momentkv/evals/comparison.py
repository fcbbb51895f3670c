"""Variants against each other on the same samples: means, intervals, and the difference to the strongest baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

from momentkv.evals.results import Entry
from momentkv.evals.statistics import Array, bootstrap, interval, weighted_means
from momentkv.evals.variants import FULL

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
    rivals = [
        None if entry.method == FULL else strongest(i, entries, values, nbytes, higher)
        for i, entry in enumerate(entries)
    ]
    own = _ends(draws, strata)
    gaps = _ends(draws - draws[:, [i if rival is None else rival for i, rival in enumerate(rivals)]], strata)
    return [
        Compared(float(values[i]), own[i])
        if rival is None
        else Compared(float(values[i]), own[i], entries[rival], float(values[i] - values[rival]), gaps[i])
        for i, rival in enumerate(rivals)
    ]


def _ends(draws: Array, strata: Sequence[tuple[float, Array]]) -> list[tuple[float, float] | None]:
    """The interval of each column; None where a stratum has one sample, which says nothing about the spread."""
    if any(x.shape[1] < 2 for _, x in strata):
        return [None] * draws.shape[1]
    return [(low, high) for low, high in interval(draws).T.tolist()]
