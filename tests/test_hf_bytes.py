"""Bytes: constant, measured on the tensors, and within the budget that was asked for."""

import gc

import pytest
import torch

from conftest import build, prompt
from helpers import compressed, forward
from momentkv import METHODS, state_spec
from momentkv.hf import attend
from momentkv.hf.compat import cache_argument

COMPRESSING = [m for m in METHODS if m != "full"]


def live_bytes() -> int:
    """Bytes of all distinct storages that tensors hold just now."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_constant_over_2000_generated_tokens(tiny):
    caches = {m: compressed(tiny, 50, m) for m in ("momentkv", "momentkv:paper", "h2o", "adakv")}
    for cache in caches.values():
        forward(tiny, prompt(1, 120), cache)
    before = {m: (c.report().total, [x.keys.data_ptr() for x in _states(c)]) for m, c in caches.items()}
    held = live_bytes()
    with attend(tiny), torch.no_grad():
        for i in range(2000):
            for cache in caches.values() if i % 20 == 0 else [caches["momentkv"]]:
                tiny(prompt(1, 1, seed=i), use_cache=True, **cache_argument(cache))
    for m, cache in caches.items():
        assert (cache.report().total, [x.keys.data_ptr() for x in _states(cache)]) == before[m], m
    assert live_bytes() <= held + 4096
    count = _states(caches["momentkv"])[0].summary["count"]
    assert (count.sum() + 2 * 50 == 2 * 2120) and caches["momentkv"].report().tokens_per_head == 50


def _states(cache):
    return [layer.state for layer in cache.moment_layers]


@pytest.mark.parametrize("method", COMPRESSING)
def test_states_are_what_they_declare(tiny, method):
    for options in (
        {},
        {"correction": "zeroth"},
        {"correction": "first", "mass": "variance"},
        {"correction": "first", "moments": "raw-float16"},
    ):
        cache = compressed(tiny, 50, method, **options)
        forward(tiny, prompt(2, 120), cache)
        for state in _states(cache):
            spec = state_spec(cache.settings, 2, 16, 16, state.keys.shape[1], torch.float32)
            assert {name: (tuple(x.shape[1:]), x.dtype) for name, x in state.tensors().items()} == spec


@pytest.mark.parametrize("method", COMPRESSING)
def test_the_report_equals_the_tensors(tiny, method):
    cache = compressed(tiny, 50, method)
    forward(tiny, prompt(2, 120), cache)
    storages = [x.untyped_storage().nbytes() for s in _states(cache) for x in s.tensors().values()]
    report = cache.report()
    assert report.total == sum(storages) == report.exact + report.summary + report.auxiliary
    assert report.exact == sum(x.untyped_storage().nbytes() for s in _states(cache) for x in (s.keys, s.values))
    assert report.exact == 3 * 2 * 2 * (50 + 1) * 2 * 16 * 4  # layers, rows, heads, slots, K and V, d, fp32
    assert str(report.total).strip() in str(report).replace(",", "")


def test_adaptive_budgets_hold_what_uniform_ones_hold(tiny):
    caches = [
        compressed(tiny, 60, "momentkv", allocation=a) for a in ("uniform", "adaptive", "adaptive-floor", "pyramid")
    ]
    for cache in caches:
        forward(tiny, prompt(2, 300), cache)
    totals = {c.report().total for c in caches}
    assert len(totals) == 1
    lengths = torch.stack([s.lengths() for s in _states(caches[1])])
    assert (lengths.sum(-1) == 120).all() and (lengths[..., 0] != 60).any()


@pytest.mark.parametrize("method", ["momentkv", "snapkv", "h2o", "momentkv:paper", "pyramidkv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"interval": 8}, {"mass": "variance"}, {"correction": "zeroth"}])
def test_byte_budgets_bind_the_total(method, dtype, options):
    model = build("llama").to(dtype)
    te = 2 * 16 * dtype.itemsize
    for budget, limit in (("120te", 3 * 2 * 120 * te), ("96KiB", 96 * 1024 / 2)):
        cache = compressed(model, budget, method, **options)
        forward(model, prompt(2, 300), cache)
        forward(model, prompt(2, 1), cache)
        per_row = cache.report().total / 2
        assert per_row <= limit, (budget, per_row, limit)
        if method != "pyramidkv":
            one_more = 3 * 2 * (te + 8)
            assert per_row > limit - one_more, "the budget is used to the last token"


def test_free_slots_are_the_only_slack(tiny):
    cache = compressed(tiny, 64, "snapkv", interval=16)
    forward(tiny, prompt(1, 200), cache)
    seen = []
    for i in range(40):
        forward(tiny, prompt(1, 1, seed=i), cache)
        seen.append(cache.report().tokens_per_head)
    assert max(seen) <= 64 and min(seen) >= 64 - 16 + 1 and cache.report().exact == 3 * 2 * 65 * 2 * 16 * 4


def test_a_prefill_never_holds_the_full_keys_of_two_layers():
    model, n = build("llama", num_hidden_layers=6), 1500
    layer = 2 * n * 2 * 16 * 4
    peaks = []

    def note(*_):
        peaks.append(live_bytes() - base)

    cache = compressed(model, 64)
    for block in model.model.layers:
        block.register_forward_hook(note)
    base = live_bytes()
    forward(model, prompt(1, n), cache)
    hidden = n * 64 * 4
    assert max(peaks) < base + layer + 12 * hidden and peaks[-1] - peaks[0] < 6 * (64 + 40) * 2 * 2 * 16 * 4 + hidden


def test_a_prompt_in_chunks_needs_memory_for_a_chunk_only(tiny):
    cache = compressed(tiny, 64)
    totals = []
    for i in range(12):
        forward(tiny, prompt(1, 256, seed=i), cache)
        totals.append((cache.report().total, live_bytes()))
    assert len({t for t, _ in totals}) == 1
    assert totals[-1][1] <= totals[1][1] + 4096
