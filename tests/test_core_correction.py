"""The estimated state of the evicted set: formulas, exact cases, the known counter-example, adversarial inputs."""

import math

import pytest
import torch

import oracles
from momentkv import AttnState, Moments, attend, estimate, merge
from momentkv.correction import MASS_RULES, VALUE_RULES

BOTH = {"first_order": True, "variance": True}
PAIRS = [(order, mass) for order in VALUE_RULES for mass in MASS_RULES]


def draw(n, dtype=torch.float64, seed=0):
    """Queries `[2, 2, 3, 2, 5]`, keys `[2, 2, n, 5]` and values `[2, 2, n, 4]`."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(2, 2, 3, 2, 5, generator=g, dtype=torch.float64)
    k, v = (torch.randn(2, 2, n, x, generator=g, dtype=torch.float64) for x in (5, 4))
    return a.to(dtype), k.to(dtype), v.to(dtype)


def close(x, y):
    torch.testing.assert_close(x.out, y.out)
    torch.testing.assert_close(x.lse, y.lse)


@pytest.mark.parametrize(("order", "mass"), PAIRS)
def test_formulas_query_by_query(order, mass):
    a, k, v = draw(9)
    got = estimate(a, Moments.of(k, v, **BOTH), order, mass)
    for b, h, g, q in torch.cartesian_prod(*(torch.arange(n) for n in a.shape[:-1])).tolist():
        query = a[b, h, g, q]
        m = oracles.summarise([oracles.Token(i, k[b, h, i], v[b, h, i]) for i in range(9)], 5, 4)
        value, lse = m.mean_v, math.log(9) + query @ m.mean_k
        if order == "first":
            value = value + m.scatter_vk @ query / 9
        if mass == "variance":
            lse = lse + torch.log(1 + query @ m.scatter_kk @ query / 18)
        torch.testing.assert_close(got.out[b, h, g, q], value)
        torch.testing.assert_close(got.lse[b, h, g, q], lse)


@pytest.mark.parametrize(("order", "mass"), PAIRS)
@pytest.mark.parametrize("copies", [1, 2, 50])
def test_one_token_and_its_copies_are_exact(order, mass, copies):
    a, k, v = draw(1)
    k, v = k.repeat(1, 1, copies, 1), v.repeat(1, 1, copies, 1)
    close(estimate(a * 7, Moments.of(k, v, **BOTH), order, mass), attend(a * 7, k, v))


def test_equal_keys_give_the_exact_state():
    a, k, v = draw(12)
    k = k[:, :, :1].expand_as(k)
    close(estimate(a, Moments.of(k, v), "first", "jensen"), attend(a, k, v))


def test_first_order_is_the_derivative_at_zero():
    a, k, v = draw(12)
    m, step = Moments.of(k, v, **BOTH), 1e-3
    exact = attend(a * step, k, v)
    error = {order: (estimate(a * step, m, order, "jensen").out - exact.out).norm() for order in VALUE_RULES}
    assert error["first"] < 1e-2 * error["zeroth"]
    missing = exact.lse - estimate(a * step, m, "first", "jensen").lse
    second = estimate(a * step, m, "first", "variance").lse - estimate(a * step, m, "first", "jensen").lse
    assert (missing > 0).all()  # Jensen's mass is a lower bound
    torch.testing.assert_close(second, missing, rtol=1e-2, atol=0)


def test_counter_example_where_the_correction_overshoots():
    """Keys +-c u with values +-w: 0.987 w in truth, 2.5 w corrected, 4.66 w with the variance mass."""
    k = torch.tensor([5.0, -5.0], dtype=torch.float64).view(1, 1, 2, 1)
    v = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 1, 2, 1)
    a = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    retained = AttnState(torch.zeros_like(a), torch.full((1, 1, 1, 1), math.log(2)).double())
    m = Moments.of(k, v, **BOTH)
    assert merge(retained, attend(a, k, v)).out.item() == pytest.approx(0.987, abs=5e-4)
    assert merge(retained, estimate(a, m, "first", "jensen")).out.item() == pytest.approx(2.5)
    assert merge(retained, estimate(a, m, "first", "variance")).out.item() == pytest.approx(4.66, abs=5e-3)


def test_each_query_head_is_corrected_with_its_own_query():
    a, k, v = draw(9)
    m = Moments.of(k, v, **BOTH)
    all_heads = estimate(a, m, "first", "variance")
    for g in range(a.shape[2]):
        alone = estimate(a[:, :, g : g + 1], m, "first", "variance")
        close(AttnState(all_heads.out[:, :, g : g + 1], all_heads.lse[:, :, g : g + 1]), alone)
    assert (all_heads.out[:, :, 0] - all_heads.out[:, :, 1]).abs().min() > 1e-6


def test_nothing_evicted_corrects_nothing():
    a, k, v = draw(6)
    exact = attend(a, k, v)
    for order, mass in PAIRS:
        none = estimate(a, Moments.empty(k, v, **BOTH), order, mass)
        assert (none.lse == -torch.inf).all() and torch.isfinite(none.out).all()
        close(merge(exact, none), exact)
        assert torch.equal(merge(exact, none).out, exact.out)


def test_missing_matrices_are_named():
    a, k, v = draw(6)
    with pytest.raises(ValueError, match="scatter_vk"):
        estimate(a, Moments.of(k, v, first_order=False), "first", "jensen")
    with pytest.raises(ValueError, match="scatter_kk"):
        estimate(a, Moments.of(k, v), "first", "variance")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("order", "mass"), PAIRS)
def test_adversarial_inputs_stay_finite(order, mass, dtype):
    a, k, v = draw(40, dtype)
    sink = k.clone()
    sink[:, :, 0] = sink[:, :, 0] * 100  # a sink among the evicted
    opposite = torch.cat([k[:, :, :1], -k[:, :, :1]] * 3, dim=2)
    sets = [(k[:, :, :0], v[:, :, :0]), (k[:, :, :1], v[:, :, :1]), (sink, v), (opposite, v[:, :, :6]), (k * 0, v)]
    for scale in (1, 1e3):
        exact = attend(a * scale, k[:, :, :4], v[:, :, :4])
        for keys, values in sets:
            m = Moments.of(keys, values, **BOTH)
            for times in (1, 10**6):  # the same shape with up to millions of tokens
                many = Moments(m.count * times, m.mean_k, m.mean_v, m.scatter_vk * times, m.scatter_kk * times)
                got = merge(exact, estimate(a * scale, many, order, mass))
                assert torch.isfinite(got.out).all() and torch.isfinite(got.lse).all()
                assert (got.lse >= exact.lse).all()
