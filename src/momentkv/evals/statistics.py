"""Bootstrap intervals of means, of means over several tasks, and of paired differences."""

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
RESAMPLES = 10_000
SEED = 20_260
LEVEL = 0.95
_CELLS = 2**22  # of the counts that are held at once


def means_at(values: Array, index: Array) -> Array:
    """Means over chosen samples, `[r, k]`.

    A sample that is drawn twice counts twice, so a resample is a row of counts, and all means are one product.

    Args:
        values: `[k, n]`, k figures of each of n samples. index: `[r, n]`, for each of r resamples the samples drawn.
    """
    resamples, n = index.shape
    cells = index + n * np.arange(resamples)[:, None]
    counts = np.bincount(cells.ravel(), minlength=resamples * n).reshape(resamples, n)
    return counts.astype(float) @ values.T / n


def resampled_means(values: Array, rng: np.random.Generator, resamples: int = RESAMPLES) -> Array:
    """Means of resamples drawn with replacement, `[resamples, k]`, the same samples for all k figures (paired).

    Args:
        values: `[k, n]`, finite.
    """
    n = values.shape[1]
    block = max(1, _CELLS // n)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    return np.concatenate([means_at(values, rng.integers(n, size=(size, n))) for size in sizes])


def bootstrap(strata: Sequence[tuple[float, Array]], resamples: int = RESAMPLES, seed: int = SEED) -> Array:
    """Resampled weighted sums of the strata's means, `[resamples, k]`.

    Samples are drawn within each stratum, as many as it has: tasks of a benchmark are given, not drawn.
    A difference of two columns is the paired bootstrap of the difference.

    Args:
        strata: pairs of a weight and `[k, n]` figures; one pair of weight 1 for a single task.
    """
    rng = np.random.default_rng(seed)
    return sum(weight * resampled_means(values, rng, resamples) for weight, values in strata)  # type: ignore[return-value]


def interval(draws: Array, level: float = LEVEL) -> Array:
    """The central `level` of resampled figures (percentile bootstrap): `[2, ...]`, low and high, from `[r, ...]`."""
    return np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)


def weighted_means(strata: Sequence[tuple[float, Array]]) -> Array:
    """What `bootstrap` resamples, of the samples as they are: `[k]`."""
    return np.sum([weight * values.mean(1) for weight, values in strata], axis=0)
