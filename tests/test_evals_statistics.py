"""Intervals: against loops, against known distributions, and what pairing and strata are for."""

import numpy as np
import pytest

from momentkv.evals.comparison import compare, strongest
from momentkv.evals.results import Entry
from momentkv.evals.statistics import bootstrap, interval, means_at, resampled_means, weighted_means

PLAIN = Entry("snapkv", None, "128", "tokens", False, "")
OTHER = Entry("adakv", None, "128", "tokens", False, "")
BYTES = Entry("adakv", None, "128", "bytes", False, "")
CORRECTED = Entry("momentkv", None, "128", "tokens", True, "")
FULL = Entry("full", None, "full", "tokens", False, "")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_means_are_those_of_a_loop_over_the_same_indices():
    values, index = rng().integers(0, 64, (3, 8)) / 64.0, rng(1).integers(8, size=(50, 8))
    loop = np.array([[np.mean([row[i] for i in drawn]) for row in values] for drawn in index])
    assert np.array_equal(means_at(values, index), loop)  # to the bit: eighths of dyadic numbers


def test_resamples_are_the_generators_indices_whatever_the_block_size(monkeypatch):
    values = rng().standard_normal((2, 7))
    whole = resampled_means(values, rng(3), 100)
    np.testing.assert_allclose(whole, means_at(values, rng(3).integers(7, size=(100, 7))))
    monkeypatch.setattr("momentkv.evals.statistics._CELLS", 7 * 9)
    np.testing.assert_allclose(resampled_means(values, rng(3), 100), whole)


def test_the_same_seed_gives_the_same_interval():
    values = rng().standard_normal((2, 40))
    first, again, other = (interval(bootstrap([(1.0, values)], seed=s)) for s in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("draw", ["normal", "exponential", "binary"])
def test_ninety_five_percent_of_intervals_hold_the_true_mean(draw):
    source, true = rng(7), {"normal": 0.0, "exponential": 1.0, "binary": 0.3}[draw]
    trials = {
        "normal": lambda: source.normal(0, 1, 80),
        "exponential": lambda: source.exponential(1, 80),
        "binary": lambda: (source.random(80) < 0.3).astype(float),
    }[draw]
    held = 0
    for i in range(300):
        low, high = interval(bootstrap([(1.0, trials()[None])], resamples=1000, seed=i))[:, 0]
        held += low <= true <= high
    assert 0.90 <= held / 300 <= 0.98  # percentile intervals of 80 samples are a little too narrow


def test_the_interval_of_a_normal_mean_is_its_textbook_width():
    values = rng().normal(5, 2, (1, 400))
    low, high = interval(bootstrap([(1.0, values)]))[:, 0]
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.05)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.02)


def test_a_paired_difference_is_known_better_than_an_unpaired_one():
    source = rng(5)
    hard = source.normal(0, 1, 200)
    a, b = hard + source.normal(0.1, 0.2, 200), hard + source.normal(0, 0.2, 200)
    draws = bootstrap([(1.0, np.stack([a, b]))])
    low, high = interval(draws[:, 0] - draws[:, 1])
    apart = bootstrap([(1.0, a[None])], seed=1)[:, 0] - bootstrap([(1.0, b[None])], seed=2)[:, 0]
    wide = interval(apart)
    assert high - low < 0.4 * (wide[1] - wide[0])
    assert low > 0 > wide[0]  # what pairing finds, the other misses
    differences = interval(bootstrap([(1.0, (a - b)[None])]))[:, 0]
    np.testing.assert_allclose((low, high), differences)  # the same resamples, so the same interval


def test_strata_are_resampled_apart_and_weighted():
    easy, hard = np.full((1, 5), 1.0), np.zeros((1, 500))
    draws = bootstrap([(0.25, easy), (0.75, hard)])
    assert np.allclose(draws, 0.25)  # drawn from both together, the mean would vary
    noise = rng().normal(0, 1, (1, 100)), rng(1).normal(0, 1, (1, 100))
    both = bootstrap([(0.5, noise[0]), (0.5, noise[1])])
    expected = np.sqrt(sum(x.var() / 100 for x in noise)) / 2
    assert both.std() == pytest.approx(expected, rel=0.05)  # they are independent
    assert weighted_means([(0.25, easy), (0.75, hard)]).tolist() == [0.25]


@pytest.mark.parametrize(
    ("values", "nbytes", "higher", "chosen"),
    [
        ((0.5, 0.6, 0.9, 0.8), (100, 100, 130, 130), True, 2),
        ((0.5, 0.6, 0.9, 0.8), (100, 100, 130.6, 130), True, 2),  # 0.5 % more is no more
        ((0.5, 0.6, 0.9, 0.8), (100, 100, 131, 130), True, 1),
        ((0.5, 0.6, 0.4, 0.8), (100, 100, 130, 130), True, 1),
        ((0.5, 0.6, 0.9, 0.8), (100, 100, 130, 130), False, 0),
        ((0.5, 0.6, 0.9, 0.8), (140, 140, 140, 130), True, None),
    ],
)
def test_the_baseline_is_the_best_that_holds_no_more_bytes(values, nbytes, higher, chosen):
    entries = [PLAIN, OTHER, BYTES, CORRECTED]
    assert strongest(3, entries, np.array(values), nbytes, higher) == chosen


def test_a_baseline_is_another_plain_variant_of_the_level():
    far = PLAIN._replace(level="256")
    entries = [FULL, CORRECTED, far, PLAIN]
    compared = compare(entries, [(1.0, rng().random((4, 20)))], [1.0] * 4, True)
    assert [c.baseline for c in compared] == [None, PLAIN, None, None]


def test_figures_of_a_comparison_by_hand():
    values = np.array([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    plain, corrected = compare([PLAIN, CORRECTED], [(1.0, values)], [10, 12], True)
    assert (plain.value, plain.baseline, plain.difference) == (0.5, None, None)
    assert (corrected.value, corrected.baseline, corrected.difference) == (0.75, PLAIN, 0.25)
    assert corrected.difference_interval == (0.0, 0.75)  # one of four samples differs: binomial(4, 1/4) / 4
    one = compare([PLAIN, CORRECTED], [(1.0, values[:, :1])], [10, 12], True)
    assert [c.interval for c in one] == [None, None] and one[1].difference_interval is None
