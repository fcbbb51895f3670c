"""Caches as rows of one batch: each row is what the cache would have been alone."""

import pytest
import torch

from conftest import build, prompt
from helpers import forward
from momentkv.evals.caches import compress_all
from momentkv.evals.generation import answer
from momentkv.evals.variants import variants_of
from momentkv.hf import MomentCache, attend
from momentkv.hf.compat import cache_argument
from momentkv.hf.follow import follow
from momentkv.hf.prefill import prefill
from momentkv.hf.rows import RowsCache
from momentkv.layer import LayerState
from momentkv.store import FREE

pytestmark = pytest.mark.filterwarnings("ignore:momentkv. .* layers of this")
BUDGETS = ["44", "50"]
FAMILIES = ("llama", "gemma3")


def alone(model, ids, question, variant, budget, steps):
    """Live, without anything shared: greedy tokens and the logits of each step."""
    method = variant.method.partition("+")[0]
    cache = MomentCache(model.config, budget or 128, method, variant.preset, **variant.options)
    logits = forward(model, ids, cache)[:, -1]
    if question:
        logits = forward(model, torch.tensor([question]), cache)[:, -1]
    tokens, seen = [], []
    for _ in range(steps):
        seen.append(logits[0])
        tokens.append(int(logits.argmax()))
        logits = forward(model, torch.tensor([[tokens[-1]]]), cache)[:, -1]
    return tokens, seen


def near_tie(logits, a: int, b: int) -> bool:
    return abs(float(logits[a] - logits[b])) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("question", [[], [5, 9, 23, 77]], ids=["aware", "agnostic"])
def test_every_variant_answers_as_if_alone(family, question):
    model, ids, steps = build(family), prompt(length=90), 12
    variants = variants_of(["all", "snapkv+correction=zeroth+mass=variance"], BUDGETS)
    with attend(model):
        exact = prefill(model, ids, mass=True)
    caches, held = compress_all(exact, variants, len(question) + steps + 1)
    got: dict[int, list[int]] = {}
    answer(model, caches, exact.logits, question, steps, set(), set(), lambda i, tokens: got.update({i: tokens}))
    assert sorted(got) == list(range(len(variants)))
    for i, variant in enumerate(variants):
        budget = None if variant.settings is None else held[i].budget
        expected, logits = alone(model, ids, question, variant, budget, steps)
        for at, (mine, theirs) in enumerate(zip(got[i], expected, strict=True)):
            if mine != theirs:
                assert near_tie(logits[at], mine, theirs), (variant.key, at)
                break


def test_logits_of_the_rows_are_those_of_the_caches():
    model, ids = build("llama"), prompt(length=90)
    exact = prefill(model, ids)
    names = [("adakv", 44), ("snapkv", 44), ("adakv", 61), ("momentkv", 50), ("momentkv:paper", 50), ("snapkv", 70)]
    rows = RowsCache([exact.compress(b, n) for n, b in names])
    singles = [exact.compress(b, n) for n, b in names]
    for token in (3, 40, 77, 12, 9):
        new = torch.full((1, 1), token)
        with attend(model), torch.no_grad():
            together = model(new.expand(len(names), 1), use_cache=True, **cache_argument(rows)).logits[:, -1]
        for row, index in enumerate(rows.order):
            single = forward(model, new, singles[index])[0, -1]
            torch.testing.assert_close(together[row], single, rtol=1e-4, atol=1e-4)


def test_rows_that_end_leave_and_the_others_do_not_notice():
    model, ids = build("llama"), prompt(length=90)
    exact = prefill(model, ids)
    variants = variants_of(["snapkv", "momentkv"], BUDGETS)
    caches, _ = compress_all(exact, variants, 20)
    free: dict[int, list[int]] = {}
    answer(model, caches, exact.logits, [], 10, set(), set(), lambda i, t: free.update({i: t}))
    stop = free[1][4]
    caches, _ = compress_all(exact, variants, 20)
    stopped: dict[int, list[int]] = {}
    answer(model, caches, exact.logits, [], 10, {stop}, set(), lambda i, t: stopped.update({i: t}))
    for i, tokens in free.items():
        assert stopped[i] == (tokens[: tokens.index(stop)] if stop in tokens else tokens)
    assert len({len(t) for t in stopped.values()}) > 1  # some did end early


def test_a_stop_that_may_not_come_first_does_not():
    model, ids = build("llama"), prompt(length=90)
    exact = prefill(model, ids)
    first = int(exact.logits.argmax())
    caches, _ = compress_all(exact, variants_of(["snapkv"], ["44"]), 20)
    got: dict[int, list[int]] = {}
    answer(model, caches, exact.logits, [], 3, {first}, {first}, lambda i, t: got.update({i: t}))
    assert all(tokens and tokens[0] != first for tokens in got.values())


def test_stacked_states_keep_every_row():
    model, ids = build("llama"), prompt(length=90)
    exact = prefill(model, ids, mass=True)
    for method in ("h2o", "adakv", "momentkv"):
        states = [exact.compress(b, method).layers[1].state for b in (44, 60)]
        stacked = LayerState.stack(states)
        assert stacked.keys.shape[0] == 2
        for row, state in enumerate(states):
            for name, x in state.tensors().items():
                mine = stacked.tensors()[name][row : row + 1]
                torch.testing.assert_close(mine[:, : x.shape[1]] if x.dim() > 1 else mine, x)
        assert (stacked.positions[0, states[0].positions.shape[1] :] == FREE).all()


def test_what_is_held_is_what_the_live_cache_holds():
    model, ids = build("llama"), prompt(length=90)
    exact = prefill(model, ids, mass=True)
    variants = variants_of(["all"], ["44"])
    caches, held = compress_all(exact, variants, 4)
    for variant, own, cache in zip(variants, held, caches, strict=True):
        if variant.settings is None:
            continue
        report = cache.report()
        assert (own.bytes, own.summary_bytes) == (report.total, report.summary)
        assert own.peak_bytes > own.bytes
    by_key = {v.key: h for v, h in zip(variants, held, strict=True)}
    corrected, plain = by_key["momentkv@44"], by_key["adakv@44 (bytes of momentkv)"]
    assert 0 <= corrected.bytes - plain.bytes < 2 * 3 * 2 * 2 * 16 * 4  # less than a token of every head of 3 layers
    assert plain.tokens_per_head > 44 and plain.summary_bytes == 0
    full = by_key["full@full"]
    assert full.bytes == 3 * 2 * 2 * 90 * 16 * 4 and full.token_equivalents == 90


@pytest.mark.parametrize("family", FAMILIES)
def test_following_a_prefill_is_one_long_pass(family):
    model, ids = build(family), prompt(length=100)
    after = follow(model, prefill(model, ids[:, :80]), ids[:, 80:])
    with torch.no_grad():
        whole = model(ids).logits[0, 80:]
    torch.testing.assert_close(after.logits, whole, rtol=1e-4, atol=1e-4)
    for _, e in after.layers:
        assert e.keys.shape[2] == 100 and e.query_positions[0].tolist() == list(range(80, 100))
