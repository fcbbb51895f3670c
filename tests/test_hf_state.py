"""All state lives on the cache: conversations, threads, copies and odd call sequences never mix."""

import copy
import gc
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import build, prompt
from helpers import assert_same_state, compressed, forward, generate, states
from momentkv.hf import MomentCache, attend, prefill

METHODS = ["momentkv", "momentkv:paper", "h2o", "adakv", "streaming"]


@pytest.mark.parametrize("method", METHODS)
def test_interleaved_conversations_equal_separate_ones_bit_for_bit(tiny, method):
    prompts = [prompt(1, 100, seed=s) for s in (1, 2)]
    steps = [prompt(1, 1, seed=s) for s in range(10, 22)]
    separate, mixed = ([compressed(tiny, method=method) for _ in range(2)] for _ in range(2))
    alone = [[forward(tiny, x, c) for x in (p, *steps)] for p, c in zip(prompts, separate, strict=True)]
    together: list[list[torch.Tensor]] = [[], []]
    for i in range(1 + len(steps)):
        for j in range(2):
            together[j].append(forward(tiny, prompts[j] if i == 0 else steps[i - 1], mixed[j]))
    for x, y in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
    for a, b in zip(separate, mixed, strict=True):
        assert_same_state(a, b, atol=0, rtol=0)


def test_four_threads_share_one_model():
    model, outputs = build("llama"), {}

    def talk(i):
        outputs[i] = generate(model, prompt(1, 100, seed=i), compressed(model, method=METHODS[i]), 12)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert model.config._attn_implementation == "sdpa"
    for i in range(4):
        assert torch.equal(
            outputs[i], generate(model, prompt(1, 100, seed=i), compressed(model, method=METHODS[i]), 12)
        )


def test_deepcopy_forks_the_conversation(tiny):
    cache = compressed(tiny)
    forward(tiny, prompt(1, 100), cache)
    fork, before = copy.deepcopy(cache), states(cache)
    generate(tiny, torch.cat([prompt(1, 100), prompt(1, 5, seed=3)], 1), fork)
    for x, layer in zip(before, states(cache), strict=True):
        assert all(torch.equal(x[name], layer[name]) for name in x)


def test_reset_is_as_new(tiny):
    cache, ids = compressed(tiny), prompt(1, 100)
    first = generate(tiny, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.is_initialized
    assert torch.equal(generate(tiny, ids, cache), first)


def test_an_empty_cache_is_used_though_it_may_look_empty(tiny):
    cache = compressed(tiny)
    generate(tiny, prompt(1, 100), cache)
    assert cache.get_seq_length() == 111 and cache.report().tokens_per_head == 44


@pytest.mark.parametrize("method", [*METHODS, "tova", "snapkv", "pyramidkv", "knorm", "keydiff", "random", "momentkv"])
@pytest.mark.parametrize("budget", [50, 0.5, "100te"])
def test_a_shared_prefill_equals_a_live_one(tiny, method, budget):
    ids = torch.nn.functional.pad(prompt(2, 90), (10, 0))
    mask = torch.tensor([[0] * 10 + [1] * 90, [0] * 10 + [1] * 90])
    live = compressed(tiny, budget, method)
    logits = forward(tiny, ids, live, attention_mask=mask)[:, -1]
    recorded = prefill(tiny, ids, mask, mass=True)
    torch.testing.assert_close(recorded.logits, logits)
    derived = recorded.compress(budget, method)
    assert_same_state(live, derived, atol=0, rtol=0)
    assert derived.get_seq_length() == 100
    step = prompt(2, 1)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    expected = forward(tiny, step, live, attention_mask=mask)
    torch.testing.assert_close(forward(tiny, step, derived, attention_mask=mask), expected)


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 40)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("reorder"), st.sampled_from([(0, 0), (1, 0), (1, 1)])),
        st.tuples(st.just("copy"), st.just(0)),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("report"), st.just(0)),
        st.tuples(st.just("generate"), st.integers(1, 4)),
        st.tuples(st.just("crop"), st.integers(-3, 0)),
        st.tuples(st.just("without attend"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(calls=CALLS, method=st.sampled_from([*METHODS, "snapkv:scripts"]), interval=st.sampled_from([1, 3]))
def test_random_call_sequences_equal_separate_runs_or_fail_clearly(tiny, calls, method, interval):
    """Row 0 of a batch must equal a conversation of its own that gets row 0's tokens, whatever is called."""
    pair, histories = compressed(tiny, 50, method, interval=interval), [[], []]
    broken, seed = False, 0
    for name, value in calls:
        seed += 1
        if name in ("feed", "step"):
            for ids in [prompt(2, value, seed)] if name == "feed" else prompt(2, value, seed).split(1, dim=1):
                if broken:
                    with pytest.raises(RuntimeError, match="attend"):
                        forward(tiny, ids, pair)
                    continue
                assert forward(tiny, ids, pair).isfinite().all()
                [h.append(row[None]) for h, row in zip(histories, ids, strict=True)]
        elif name == "reorder":
            pair.reorder_cache(torch.tensor(value))
            histories = [list(histories[i]) for i in value]
        elif name == "copy":
            pair = copy.deepcopy(pair)
        elif name == "reset":
            pair.reset()
            histories, broken = [[], []], False
        elif name == "report" and pair.is_initialized:
            assert pair.report().total > 0 and str(pair.report())
        elif name == "generate" and not broken and histories[0]:
            ids = torch.cat([torch.cat(h, 1) for h in histories])
            ids = torch.cat([ids, prompt(2, 2, seed)], 1)
            new = generate(tiny, ids, pair, value)
            fed = torch.cat([ids[:, -2:], new[:, :-1]], 1)
            pieces = [fed[:, :2], *fed[:, 2:].split(1, dim=1)] if fed.shape[1] > 2 else [fed]
            for piece in pieces:
                [h.append(row[None]) for h, row in zip(histories, piece, strict=True)]
        elif name == "crop":
            if value == 0:
                pair.crop(0)
            else:
                with pytest.raises(ValueError, match="rolled back"):
                    pair.crop(value)
        elif name == "without attend":
            with pytest.raises(RuntimeError, match="attend"):
                for _ in range(2):
                    tiny(prompt(2, value), use_cache=True, **_argument(pair))
            broken = True
    if not broken and histories[0]:
        alone = compressed(tiny, 50, method, interval=interval)
        for piece in histories[0]:
            logits = forward(tiny, piece, alone)
        assert logits.isfinite().all()
        for layer in range(3):
            for head in range(2):
                assert torch.equal(pair.positions(layer, head), alone.positions(layer, head))


def _argument(cache: MomentCache):
    from momentkv.hf.compat import cache_argument

    return cache_argument(cache)


@pytest.mark.parametrize("outside", [True, False])
def test_inference_mode_may_change_between_calls(tiny, outside):
    cache, same = compressed(tiny), compressed(tiny)
    with torch.inference_mode(outside):
        forward(tiny, prompt(1, 100), cache)
    with torch.inference_mode(not outside):
        logits = forward(tiny, prompt(1, 1), cache)
        logits = forward(tiny, prompt(1, 7, seed=2), cache)
    for ids in (prompt(1, 100), prompt(1, 1), prompt(1, 7, seed=2)):
        expected = forward(tiny, ids, same)
    assert torch.equal(logits, expected)


def test_attend_restores_after_an_exception_and_nests():
    model = build("llama")
    with pytest.raises(KeyError), attend(model), attend(model):
        assert model.config._attn_implementation == "momentkv"
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    with attend(model):
        with attend(model):
            pass
        assert model.config._attn_implementation == "momentkv"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("method", ["full", *METHODS])
def test_a_dropped_cache_or_prefill_is_freed_at_once(tiny, method):
    """A cycle through tensors would hold a whole prompt's keys and values until some later garbage collection."""

    def alive():
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())  # isinstance asks proxies

    def use():
        with attend(tiny):
            exact = prefill(tiny, prompt(1, 100), mass=True)
        for budget in (40, 200):
            cache = exact.compress(budget, *method.split(":"))
            forward(tiny, prompt(1, 1), cache)
            live = compressed(tiny, budget, method)
            forward(tiny, prompt(1, 100), live)
            forward(tiny, prompt(1, 1), live)

    use()  # what is made once and stays
    gc.collect()
    gc.disable()
    try:
        before = alive()
        use()
        assert alive() == before
    finally:
        gc.enable()
