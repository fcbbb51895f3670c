"""Moments against their definitions: any split and order, weights, long streams, raw half-precision sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from momentkv import Moments
from momentkv.moments import from_raw_sums, to_raw_sums
from momentkv.settings import Settings
from momentkv.summary import FIELDS, absorb, moments_of, read, summary_spec

few = settings(max_examples=25, deadline=None)
BOTH = {"first_order": True, "variance": True}


def draw(n, seed=0, mean=1.0, dtype=torch.float64):
    """Correlated keys `[2, 2, n, 5]` and values `[2, 2, n, 4]` away from zero."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(2, 2, n, 5, generator=g, dtype=torch.float64) + mean
    v = k[..., :4].flip(-1) + 0.3 * torch.randn(2, 2, n, 4, generator=g, dtype=torch.float64) - 2 * mean
    return k.to(dtype), v.to(dtype)


def definition(k, v):
    """Moments of all tokens by the oracle, stacked like `Moments`."""
    tokens = [
        [[oracles.Token(i, *x) for i, x in enumerate(zip(k[b, h], v[b, h], strict=True))] for h in (0, 1)]
        for b in (0, 1)
    ]
    parts = [[oracles.summarise(t, k.shape[-1], v.shape[-1]) for t in row] for row in tokens]
    return Moments(
        *(torch.stack([torch.stack([torch.as_tensor(x[i]).double() for x in row]) for row in parts]) for i in range(5))
    )


def errors(got, exact):
    """Largest relative error of each field, by norm."""
    pairs = {name: (getattr(got, name).double(), getattr(exact, name)) for name in FIELDS}
    return {name: float((x - y).norm() / y.norm().clamp(min=1e-300)) for name, (x, y) in pairs.items()}


def assert_close(got, exact, tolerance=1e-10):
    for name in FIELDS:
        torch.testing.assert_close(getattr(got, name), getattr(exact, name), rtol=tolerance, atol=tolerance, msg=name)


@few
@given(st.integers(0, 2**31), st.lists(st.integers(0, 3), min_size=14, max_size=14), st.permutations(range(4)))
def test_any_split_in_any_order_merges_to_the_whole(seed, part, order):
    k, v = draw(14, seed)
    whole, part = definition(k, v), torch.tensor(part)
    pieces = [Moments.of(k[:, :, part == i], v[:, :, part == i], **BOTH) for i in order]
    w, x, y, z = pieces
    for merged in (w.merge(x).merge(y).merge(z), w.merge(x.merge(y.merge(z))), z.merge(y).merge(w.merge(x))):
        assert_close(merged, whole)
    assert_close(Moments.of(k, v, **BOTH), whole)
    for i, piece in zip(order, pieces, strict=True):
        assert_close(whole.subtract(piece), definition(k[:, :, part != i], v[:, :, part != i]), 1e-8)


@few
@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=9, max_size=9))
def test_weights_select_tokens(seed, kept):
    k, v = draw(9, seed)
    kept = torch.tensor(kept)
    weight = kept.expand(2, 2, 9)
    assert_close(Moments.of(k, v, weight, **BOTH), definition(k[:, :, kept], v[:, :, kept]))


def test_weights_differ_by_row_and_head():
    k, v = draw(9)
    weight = torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    got = Moments.of(k, v, weight, **BOTH)
    for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        one = oracles.summarise(
            [oracles.Token(i, k[b, h, i], v[b, h, i]) for i in weight[b, h].nonzero().flatten()], 5, 4
        )
        for name in FIELDS:
            torch.testing.assert_close(getattr(got, name)[b, h], torch.as_tensor(getattr(one, name)).double())


def test_empty_is_neutral_and_nothing_is_left_after_removing_all():
    k, v = draw(7)
    some, none = Moments.of(k, v, **BOTH), Moments.empty(k, v, **BOTH)
    for name in FIELDS:
        assert (getattr(none, name) == 0).all()
        assert torch.equal(getattr(none.merge(none), name), getattr(none, name))
        assert torch.equal(getattr(some.subtract(some), name), getattr(none, name))
    for same in (some.merge(none), none.merge(some), some.subtract(none)):
        assert_close(same, some, 1e-12)
    assert (none.inverse_count() == 0).all()


def test_fields_that_are_not_asked_for_are_none():
    k, v = draw(7)
    bare = Moments.of(k, v, first_order=False)
    assert bare.scatter_vk is None and bare.scatter_kk is None
    assert bare.merge(Moments.of(k, v, **BOTH)).scatter_vk is None
    assert Moments.of(k, v).scatter_kk is None


def test_a_million_evictions_in_fp32():
    g = torch.Generator().manual_seed(0)
    batches, size, d = 500, 2000, 4
    mix = torch.randn(d, d, generator=g)
    shift = torch.randn(2, 1, d, generator=g) * torch.tensor([0.0, 30.0]).view(2, 1, 1)  # the mean may dominate
    k = torch.randn(1, 2, size, d, generator=g) + shift
    total, exact = Moments.empty(k, k, **BOTH), Moments.empty(k.double(), k.double(), **BOTH)
    for _ in range(batches // 100):
        k = torch.randn(100, 1, 2, size, d, generator=g) + shift
        v = k @ mix + torch.randn(k.shape, generator=g)
        for piece in zip(k, v, strict=True):
            total = total.merge(Moments.of(*piece, **BOTH))
        k, v = (x.double().permute(1, 2, 0, 3, 4).flatten(2, 3) for x in (k, v))
        exact = exact.merge(Moments.of(k, v, **BOTH))
    assert (total.count == 1_000_000).all()
    assert max(errors(total, exact).values()) < 1e-4, errors(total, exact)


def test_one_at_a_time_equals_all_at_once():
    k, v = draw(1000, mean=5.0, dtype=torch.float32)
    stream = Moments.empty(k, v, **BOTH)
    for i in range(1000):
        stream = stream.merge(Moments.of(k[:, :, i : i + 1], v[:, :, i : i + 1], **BOTH))
    assert max(errors(stream, Moments.of(k.double(), v.double(), **BOTH)).values()) < 1e-5


@pytest.mark.parametrize("n", [1, 2, 1000, 10**6])
def test_any_count_at_once(n):
    k, v = draw(1000)
    repeat = -(-n // 1000)
    whole = definition(k[:, :, :n], v[:, :, :n])
    got = Moments.of(k[:, :, :n].repeat(1, 1, repeat, 1), v[:, :, :n].repeat(1, 1, repeat, 1), **BOTH)
    assert (got.count == n).all()
    for name in FIELDS:
        scale = repeat if name == "count" or name.startswith("scatter") else 1
        torch.testing.assert_close(getattr(got, name), getattr(whole, name) * scale, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tokens_are_summed_in_fp32(dtype):
    k, v = draw(5000, dtype=dtype)
    got = Moments.of(k, v, **BOTH)
    assert all(getattr(got, name).dtype == torch.float32 for name in FIELDS)
    assert max(errors(got, Moments.of(k.double(), v.double(), **BOTH)).values()) < 1e-5


def raw_error(storage, n, mean):
    """Relative error of what a stream of tokens leaves in the summary when it is stored as `storage`."""
    s = Settings(correction="first", mass="variance", moments=storage)
    k, v = draw(n, mean=mean, dtype=torch.float32)
    spec = summary_spec(s, 2, 5, 4)
    stored = {name: torch.zeros(2, *shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    for i in range(0, n, 100):
        stored = absorb(stored, moments_of(k[:, :, i : i + 100], v[:, :, i : i + 100], torch.ones(2, 2, 100), s), s)
    assert {name: x.dtype for name, x in stored.items()} == {name: dtype for name, (_, dtype) in spec.items()}
    assert (read(stored, s).count == n).all()  # exact whatever the storage
    return errors(read(stored, s), Moments.of(k.double(), v.double(), **BOTH))


def test_raw_sums_agree_in_fp32_and_fail_in_16_bit():
    assert max(raw_error("centred", 3000, 1.0).values()) < 1e-5
    assert max(raw_error("raw-float32", 3000, 1.0).values()) < 1e-3
    bf16 = raw_error("raw-bfloat16", 3000, 8.0)
    assert bf16["mean_k"] > 0.01 and bf16["scatter_vk"] > 1
    fp16 = raw_error("raw-float16", 3000, 8.0)  # sum v k^T passes 65504
    assert not fp16["scatter_vk"] < 1


def test_raw_sums_are_the_papers_statistics():
    k, v = draw(6)
    sums = to_raw_sums(Moments.of(k, v, **BOTH), torch.float64)
    torch.testing.assert_close(sums["mean_k"], k.sum(2))
    torch.testing.assert_close(sums["mean_v"], v.sum(2))
    torch.testing.assert_close(sums["scatter_vk"], torch.einsum("bhnv,bhnd->bhvd", v, k))
    torch.testing.assert_close(sums["scatter_kk"], torch.einsum("bhnd,bhne->bhde", k, k))
    assert_close(from_raw_sums(sums), definition(k, v), 1e-9)


def test_small_entries_are_clamped_to_zero():
    k = torch.tensor([[1e-4, 2.0], [-1e-4, 4.0]], dtype=torch.float64).view(1, 1, 2, 2)
    v = torch.tensor([[4e-3], [-4e-3]], dtype=torch.float64).view(1, 1, 2, 1)
    sums = to_raw_sums(Moments.of(k, v), torch.float64)  # centred S: 8e-7 and -8e-3
    assert from_raw_sums(sums).scatter_vk.flatten().tolist() == pytest.approx([0.0, -8e-3])
    assert from_raw_sums(sums, clamp=0.0).scatter_vk.flatten().tolist() == pytest.approx([8e-7, -8e-3])
