"""Budgets and selection as laws: what parses, what sums are conserved, who is kept, how ragged heads are stored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from momentkv import Budget, Settings, store
from momentkv.budgets import adaptive, pyramid, round_to_sum
from momentkv.selection import block_means, keep_mask, protected, ranks

few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**31)


def generator(seed):
    return torch.Generator().manual_seed(seed)


PARSED = [
    (128, "tokens", 128),
    ("128", "tokens", 128),
    (1, "tokens", 1),
    (0.1, "share", 0.1),
    ("0.1", "share", 0.1),
    (1.0, "share", 1.0),
    ("16MiB", "bytes", 16 * 2**20),
    ("1.5 kb", "bytes", 1500),
    ("2GB", "bytes", 2e9),
    ("7b", "bytes", 7),
    ("128te", "te", 128),
    (" 33.5TE ", "te", 33.5),
    (Budget("te", 2), "te", 2),
]


@pytest.mark.parametrize(("given", "kind", "amount"), PARSED)
def test_budget_forms(given, kind, amount):
    budget = Budget.parse(given)
    assert (budget.kind, budget.amount) == (kind, amount)
    assert Budget.parse(budget) == budget


@pytest.mark.parametrize("given", [x for x, *_ in PARSED] + ["1234567", "1234567te", "123456789B", 0.123456789])
def test_budget_text_parses_back(given):
    assert Budget.parse(str(Budget.parse(given))) == Budget.parse(given)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "many",
        "1e3",
        "-1",
        "nan",
        "12 tokens",
        "0te",
        "0MiB",
        "1.5.2",
        "½",
        None,
        True,
        [],
        0.0,
        -0.1,
        1.5,
        "1.5",
        float("nan"),
        float("inf"),
    ],
)
def test_bad_budgets_are_quoted_and_valid_forms_named(bad):
    with pytest.raises(ValueError) as e:
        Budget.parse(bad)
    assert str(bad) in str(e.value)
    for form in ("128", "0.1", "16MiB", "128te"):
        assert form in str(e.value)


@pytest.mark.parametrize("bad", [0, -3, "0"])
def test_at_least_one_token(bad):
    with pytest.raises(ValueError, match=f"{bad}.*at least 1 token"):
        Budget.parse(bad)


@few
@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=9))
def test_rounding_conserves_the_sum(x):
    x[-1] += round(sum(x)) - sum(x) if x[-1] >= 1 else 0
    total = round(sum(x))
    x = [y * total / max(sum(x), 1e-9) for y in x]
    got = round_to_sum(torch.tensor([x, x[::-1]], dtype=torch.float64))
    assert got.sum(-1).tolist() == [total, total]
    assert (got[0].double() - torch.tensor(x).double()).abs().max() < 1 + 1e-6
    assert (got >= 0).all()


@few
@given(
    st.integers(1, 80),
    st.integers(0, 300),
    st.integers(0, 8),
    st.integers(1, 64),
    st.integers(1, 9),
    st.none() | st.integers(1, 900),
)
def test_pyramid(layers, extra, sinks, window, interval, prompt):
    s = Settings(allocation="pyramid", sinks=sinks, window=window, interval=interval)
    tokens = s.least_budget + extra
    got = pyramid(tokens, s, layers, prompt)
    assert len(got) == layers and sum(got) == tokens * layers
    assert got == sorted(got, reverse=True)
    assert min(got) >= s.least_budget
    if prompt is not None and prompt > tokens:
        assert max(got) <= prompt


@pytest.mark.parametrize("layers", [2, 16, 31])
def test_pyramid_is_the_papers_ramp(layers):
    got = pyramid(128, Settings(sinks=0, window=8), layers)
    assert got == oracles.largest_remainder(oracles.pyramid(128, 8, layers))


def test_pyramid_never_asks_for_more_than_the_prompt():
    got = pyramid(128, Settings(sinks=0, window=8), 3, prompt=150)
    assert got == [150, 128, 106]


def scores_of(seed, kind, batch, heads, n):
    g = generator(seed)
    if kind == "random":
        return torch.randn(batch, heads, n, generator=g)
    if kind == "ties":
        return torch.randint(0, 3, (batch, heads, n), generator=g).float()
    return torch.full((batch, heads, n), {"infinite": torch.inf, "zero": 0.0, "minus infinite": -torch.inf}[kind])


kinds = st.sampled_from(["random", "ties", "infinite", "zero", "minus infinite"])
ADAPTIVE = {
    "allocation": st.sampled_from(["adaptive", "adaptive-floor"]),
    "alpha": st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    "interval": st.integers(1, 5),
}


@few
@given(
    seeds,
    kinds,
    st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(8, 40)),
    st.fixed_dictionaries(ADAPTIVE),
    st.floats(0, 1),
)
def test_adaptive_budgets(seed, kind, shape, options, fill):
    batch, heads, n = shape
    s = Settings(sinks=0, window=1, **options)
    scores = scores_of(seed, kind, batch, heads, n)
    shielded = torch.randint(0, 4, (batch, 1), generator=generator(seed)).expand(-1, heads)
    eligible = torch.arange(n) >= shielded.unsqueeze(-1)  # the same number of tokens in every head
    least, most = shielded.sum(-1) + heads * s.interval, torch.full((batch,), heads * n)
    total = (least + (most - least) * fill).long()
    got = adaptive(scores, eligible, shielded, total, s)
    assert torch.equal(got.sum(-1), total)
    assert (got >= shielded + s.interval).all()  # every head can evict an interval while decoding
    assert (got <= n).all()
    one = adaptive(scores[-1:], eligible[-1:], shielded[-1:], total[-1:], s)
    assert torch.equal(one[0], got[-1])  # a row's budgets are its own
    if options["alpha"] == 1.0 and options["allocation"] == "adaptive":
        assert int((got - shielded).amax(-1).sub((got - shielded).amin(-1)).max()) <= 1
    if options["allocation"] == "adaptive-floor" and kind != "infinite":
        assert (got >= (s.alpha * total.double() / heads).floor().unsqueeze(-1)).all()  # shielded tokens count


@few
@given(
    seeds, st.lists(st.integers(3, 20), min_size=2, max_size=5), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.floats(0, 1)
)
def test_no_head_gets_more_than_it_has(seed, has, alpha, fill):
    """Heads that hold different numbers of tokens, as after an earlier eviction."""
    heads, n = len(has), max(has)
    eligible = (torch.arange(n) < torch.tensor(has).unsqueeze(-1)).unsqueeze(0)
    total = torch.tensor([heads + int(fill * (sum(has) - heads))])
    scores = torch.randn(1, heads, n, generator=generator(seed))
    got = adaptive(
        scores,
        eligible,
        torch.zeros(1, heads).long(),
        total,
        Settings(allocation="adaptive", alpha=alpha, sinks=0, window=1),
    )
    assert got.sum() == total
    assert (got <= torch.tensor(has)).all()


@few
@given(seeds, st.integers(2, 5), st.integers(10, 30), st.sampled_from([0.1, 0.3, 0.7]), st.integers(0, 4))
def test_adaptive_is_ada_kv(seed, heads, n, alpha, guarded):
    total, shielded = torch.tensor([heads * (n // 2 + guarded)]), torch.full((1, heads), guarded)
    scores = torch.randn(1, heads, n, generator=generator(seed))
    for allocation in ("adaptive", "adaptive-floor"):
        s = Settings(allocation=allocation, alpha=alpha, sinks=0, window=1)
        got = adaptive(scores, torch.ones_like(scores, dtype=torch.bool), shielded, total, s)
        judged = [dict(enumerate(x)) for x in scores[0].tolist()]
        expected = oracles.head_budgets(s, judged, [guarded] * heads, int(total))
        if min(expected) > 2 + guarded:  # otherwise the least budget of a head decides
            assert got[0].tolist() == expected


def test_equal_remainders_go_to_the_earlier_head():
    scores = torch.zeros(1, 2, 20)
    scores[0, 0, :17], scores[0, 1, :12] = 1.0, 1.0  # shares 0.8 * 17 + 2.9 = 16.5 and 12.5
    got = adaptive(
        scores,
        torch.ones_like(scores, dtype=torch.bool),
        torch.zeros(1, 2).long(),
        torch.tensor([29]),
        Settings(allocation="adaptive", sinks=0, window=1),
    )
    assert got.tolist() == [[17, 12]]


@few
@given(seeds, kinds, st.integers(1, 5), st.integers(1, 20))
def test_keep_mask(seed, kind, block, n):
    g = generator(seed)
    scores = scores_of(seed, kind, 2, 3, n)
    valid = torch.rand(2, 3, n, generator=g) < 0.8
    shield = torch.rand(2, 3, n, generator=g) < 0.2
    budget = (shield & valid).sum(-1) + torch.randint(0, n + 1, (2, 3), generator=g)
    keep = keep_mask(scores, valid, shield, budget, block)
    assert torch.equal(keep.sum(-1), torch.minimum(budget, valid.sum(-1)))
    assert (keep <= valid).all() and ((shield & valid) <= keep).all()
    for b, h in ((0, 0), (1, 2)):
        free = (valid & ~shield)[b, h].nonzero().flatten().tolist()
        blocks = oracles.in_blocks(free, {p: p for p in free}, block)
        room = int(budget[b, h] - (shield & valid)[b, h].sum())
        chosen = oracles.choose(dict(enumerate(scores[b, h].tolist())), blocks, room) if kind == "random" else set()
        if chosen:
            assert set((keep & ~shield)[b, h].nonzero().flatten().tolist()) == chosen


def test_ties_go_to_the_earlier_token():
    scores, yes = torch.tensor([[[1.0, 2.0, 1.0, 2.0, 1.0]]]), torch.ones(1, 1, 5, dtype=torch.bool)
    assert ranks(scores, yes).tolist() == [[[2, 0, 3, 1, 4]]]
    assert keep_mask(scores, yes, ~yes, torch.tensor([[3]])).tolist() == [[[True, True, False, True, False]]]


def test_protected_counts_in_positions_of_the_row():
    positions = torch.tensor([0, 1, 4, 7, 8, 9, -1]).expand(2, 1, 7)
    got = protected(positions, positions >= 0, torch.tensor([10, 9]), 2, torch.tensor([2, 1]))
    assert got[:, 0].int().tolist() == [[1, 1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1, 0]]
    assert protected(positions, positions >= 0, torch.tensor([10, 10]), 0, 0).sum() == 0


def test_block_means_leave_out_what_is_not_eligible():
    scores = torch.tensor([[[1.0, 3.0, 9.0, 5.0, 7.0]]])
    eligible = torch.tensor([[[True, True, False, True, True]]])
    got = block_means(scores, eligible, 2)
    assert got[eligible].tolist() == [2.0, 2.0, 5.0, 7.0]


@few
@given(st.lists(st.lists(st.integers(1, 6), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(0, 4), seeds)
def test_packing_round_trips(capacities, spare, seed):
    capacity = torch.tensor(capacities, dtype=torch.int32)
    width, slots = int(capacity.max()), int(capacity.sum(-1).max()) + spare
    exists = torch.arange(width) < capacity.unsqueeze(-1)
    x = torch.randn(*capacity.shape, width, 4, generator=generator(seed)).masked_fill(~exists.unsqueeze(-1), 0)
    positions = torch.arange(x[..., 0].numel()).view_as(x[..., 0]).masked_fill(~exists, store.FREE)
    for dense, free in ((x, 0), (x[..., 0], 0), (positions, store.FREE)):
        flat = store.pack(dense, capacity, slots)
        assert torch.equal(store.unpack(flat, capacity, width), dense)
        for row, n in zip(flat, capacity.sum(-1).tolist(), strict=True):
            assert (row[n:] == free).all()


def test_equal_capacities_are_a_view():
    capacity = torch.full((2, 3), 4, dtype=torch.int32)
    flat = torch.zeros(2, 12, 5)
    store.unpack(flat, capacity, 4)[1, 2, 3] = 7.0
    assert (flat[1, 11] == 7).all() and flat.sum() == 35
