"""Attention states: the merge laws, the empty set, extreme logits, blocks of queries, 16-bit inputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import momentkv.state
import oracles
from momentkv import AttnState, attend, merge
from momentkv.state import empty_like

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**31)


def draw(seed, n, scale=1.0, dtype=torch.float64, queries=3):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(2, 2, 3, queries, 5, generator=g, dtype=torch.float64) * scale
    k, v = (torch.randn(2, 2, n, x, generator=g, dtype=torch.float64) for x in (5, 4))
    return a.to(dtype), k.to(dtype), v.to(dtype)


def close(x, y, **tolerance):
    torch.testing.assert_close(x.out, y.out, **tolerance)
    torch.testing.assert_close(x.lse, y.lse, **tolerance)


def expected(a, k, v, keep=None):
    """The oracle, query by query; `keep` are the token indices attended to."""
    keep = range(k.shape[2]) if keep is None else keep
    out, lse = torch.zeros(*a.shape[:-1], v.shape[-1]), torch.zeros(a.shape[:-1])
    out, lse = out.double(), lse.double()
    for b, h, g, q in torch.cartesian_prod(*(torch.arange(n) for n in a.shape[:-1])).tolist():
        tokens = [oracles.Token(i, k[b, h, i].double(), v[b, h, i].double()) for i in keep]
        out[b, h, g, q], lse[b, h, g, q] = oracles.state(a[b, h, g, q], tokens)
    return AttnState(out, lse)


@few
@given(seeds, st.lists(st.integers(0, 3), min_size=12, max_size=12), st.sampled_from([0.1, 1.0, 30.0]))
def test_any_split_in_any_order_merges_to_the_union(seed, part, scale):
    a, k, v = draw(seed, 12, scale)
    states = [attend(a, k, v, torch.tensor([p == i for p in part]).expand(1, 1, 1, 1, -1)) for i in range(4)]
    union = expected(a, k, v)
    w, x, y, z = states
    for merged in (merge(merge(merge(w, x), y), z), merge(w, merge(x, merge(y, z))), merge(merge(z, x), merge(w, y))):
        close(merged, union)
    for once, twice in ((merge(w, x), merge(x, w)), (merge(empty_like(x), x), x), (merge(x, empty_like(x)), x)):
        close(once, twice, rtol=0, atol=0)


def test_nothing_to_attend_to_is_the_empty_state():
    a, k, v = draw(0, 6)
    for none in (
        attend(a, k, v, torch.zeros(1, 1, 1, 1, 6, dtype=torch.bool)),
        attend(a, k[:, :, :0], v[:, :, :0]),
        merge(*[empty_like(attend(a, k, v))] * 2),
    ):
        assert (none.out == 0).all()
        assert (none.lse == -torch.inf).all()


def test_masks_differ_by_row_head_and_query():
    a, k, v = draw(1, 6)
    mask = torch.rand(2, 2, 3, 3, 6, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[0, 0, 0, 0] = False
    got = attend(a, k, v, mask)
    for b, h, g, q in torch.cartesian_prod(*(torch.arange(n) for n in a.shape[:-1])).tolist():
        keep = mask[b, h, g, q].nonzero().flatten().tolist()
        part = a[b : b + 1, h : h + 1, g : g + 1, q : q + 1], k[b : b + 1, h : h + 1], v[b : b + 1, h : h + 1]
        one = expected(*part, keep) if keep else empty_like(attend(*part))
        close(AttnState(got.out[b, h, g, q], got.lse[b, h, g, q]), AttnState(one.out.view(-1), one.lse.view(())))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_extreme_logits(dtype, tolerance):
    """A log-normaliser of 1e4 is known to 1e-3 in fp32, and so are the weights that come from it."""
    k = torch.tensor([1e4, -1e4, 9999.0, 0.0], dtype=dtype).view(1, 1, 4, 1)
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype).view(1, 1, 4, 1)
    a = torch.tensor([1.0, -1.0], dtype=dtype).view(1, 1, 1, 2, 1)
    got = attend(a, k, v)
    e, f64 = torch.e, torch.float64
    out, lse = (
        torch.tensor([(1 + 3 / e) / (1 + 1 / e), 2], dtype=f64),
        1e4 + torch.tensor([1 / e, 0], dtype=f64).log1p(),
    )
    close(
        AttnState(got.out.flatten().double(), got.lse.flatten().double()), AttnState(out, lse), rtol=tolerance, atol=0
    )
    parts = [attend(a, k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(4)]
    for order in ([0, 1, 2, 3], [1, 3, 2, 0]):
        merged = empty_like(got)
        for i in order:
            merged = merge(merged, parts[i])
        close(merged, got, rtol=tolerance, atol=0)


@pytest.mark.parametrize("elements", [1, 100, 250, 10**6])
@pytest.mark.parametrize("masked", ["no", "per query", "shared"])
def test_blocks_of_queries_are_one_block(monkeypatch, elements, masked):
    a, k, v = draw(3, 6, queries=7)
    mask = None if masked == "no" else torch.ones(7, 6).tril().bool().expand(1, 1, 1, 7, 6)
    mask = mask[..., 2:3, :] if masked == "shared" else mask
    whole = attend(a, k, v, mask)
    monkeypatch.setattr(momentkv.state, "QUERY_BLOCK_ELEMENTS", elements)
    close(attend(a, k, v, mask), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_accumulated_in_fp32(dtype):
    a, k, v = draw(4, 200, dtype=dtype, queries=1)
    got = attend(a, k, v)
    assert got.out.dtype == got.lse.dtype == torch.float32
    exact = expected(a, k, v)  # the oracle gets the rounded inputs: only the arithmetic may differ
    close(AttnState(got.out.double(), got.lse.double()), exact, rtol=1e-5, atol=1e-5)


def test_states_of_one_token_give_its_value_and_logit():
    a, k, v = draw(5, 1)
    got = attend(a, k, v)
    torch.testing.assert_close(got.out, v[:, :, None].expand_as(got.out))
    torch.testing.assert_close(got.lse, torch.einsum("bhgqd,bhd->bhgq", a, k[:, :, 0]))
