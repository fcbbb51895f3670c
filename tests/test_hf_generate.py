"""`generate` in all its forms, on compressed caches."""

import pytest
import torch
from transformers import TextStreamer

from conftest import build, prompt
from helpers import assert_same_state, compressed, forward, generate
from momentkv import METHODS
from momentkv.hf import MomentCache, attend
from momentkv.hf.compat import cache_argument

COMPRESSING = [m for m in METHODS if m != "full"] + [f"{m}:{p}" for m, x in METHODS.items() for p in x.presets]


@pytest.mark.parametrize("method", COMPRESSING)
def test_every_method_generates_and_keeps_its_budget(tiny, method):
    cache = compressed(tiny, 80, method)
    out = generate(tiny, prompt(2, 150), cache, 20)
    assert out.shape == (2, 20)
    report = cache.report()
    grown = 0 if cache.settings.decoding == "evict" else 19
    assert report.tokens_per_head == 80 + grown
    assert report.seen == 169


def manual_greedy(model, ids, cache, tokens):
    logits, out = forward(model, ids, cache), []
    for _ in range(tokens):
        out.append(logits[:, -1:].argmax(-1))
        logits = forward(model, out[-1], cache)
    return torch.cat(out, 1)


def test_generate_equals_a_loop_of_forward_passes(tiny):
    ids = prompt(2, 100)
    assert torch.equal(generate(tiny, ids, compressed(tiny), 12), manual_greedy(tiny, ids, compressed(tiny), 12))


def test_sampling_is_reproducible(tiny):
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(generate(tiny, prompt(1, 100), compressed(tiny), do_sample=True, num_return_sequences=3))
    assert runs[0].shape == (3, 12) and torch.equal(*runs)
    assert not torch.equal(runs[0][0], runs[0][1])


def test_beams_that_keep_everything_equal_the_stock_beams(tiny):
    ids = prompt(2, 40)
    expected = tiny.generate(ids, num_beams=3, max_new_tokens=10, do_sample=False)[:, 40:]
    assert torch.equal(generate(tiny, ids, compressed(tiny, 500), 10, num_beams=3), expected)


def test_beams_on_a_compressed_cache_follow_their_rows(tiny):
    """Reordered rows of a compressed cache continue as those rows would have."""
    ids = prompt(3, 100)
    cache, same = compressed(tiny), compressed(tiny)
    forward(tiny, ids, cache), forward(tiny, ids[[2, 0, 0]], same)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert_same_state(cache, same, atol=1e-5, rtol=1e-5)
    assert generate(tiny, ids, compressed(tiny), num_beams=2).shape == (3, 12)


def test_rows_can_be_repeated_and_selected(tiny):
    ids = prompt(2, 100)
    cache = compressed(tiny)
    forward(tiny, ids, cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    step = prompt(2, 1, seed=5)
    other = compressed(tiny)
    forward(tiny, ids, other)
    torch.testing.assert_close(forward(tiny, step, cache), forward(tiny, step, other))


def test_streamer_sees_every_token(tiny):
    class Collect(TextStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.seen.append("end")

    streamer, ids = Collect(), prompt(1, 100)
    out = generate(tiny, ids, compressed(tiny), streamer=streamer)
    assert streamer.seen == [*ids[0].tolist(), *out[0].tolist(), "end"]


@pytest.mark.parametrize("method", ["momentkv", "momentkv:paper", "h2o", "snapkv", "streaming", "adakv:kvpress"])
def test_chunked_prefill_equals_feeding_the_chunks(tiny, method):
    ids = prompt(2, 150)
    by_generate, by_hand = (compressed(tiny, 80, method) for _ in range(2))
    out = generate(tiny, ids, by_generate, 6, prefill_chunk_size=64)
    for piece in ids.split(64, dim=1):
        logits = forward(tiny, piece, by_hand)
    assert out[:, 0].tolist() == logits[:, -1].argmax(-1).tolist()
    for i in range(5):
        forward(tiny, out[:, i : i + 1], by_hand)
    assert_same_state(by_generate, by_hand)


def test_chunks_that_fit_equal_one_prefill(tiny):
    """Nothing is evicted before the budget is reached, so chunking must not show."""
    ids = prompt(1, 90)
    one, many = compressed(tiny, 200), compressed(tiny, 200)
    expected = forward(tiny, ids, one)[:, -1]
    for piece in ids.split(32, dim=1):
        logits = forward(tiny, piece, many)
    torch.testing.assert_close(logits[:, -1], expected, atol=1e-4, rtol=1e-4)


def test_a_second_generate_with_the_whole_history_goes_on(tiny):
    ids, more = prompt(1, 100), prompt(1, 9, seed=1)
    cache, by_hand = compressed(tiny), compressed(tiny)
    first = generate(tiny, ids, cache, 8)
    history = torch.cat([ids, first, more], 1)
    second = generate(tiny, history, cache, 8)
    expected = manual_greedy(tiny, ids, by_hand, 7)
    assert torch.equal(first[:, :7], expected)
    logits = forward(tiny, history[:, 107:], by_hand)
    assert second[0, 0] == logits[0, -1].argmax()
    assert cache.get_seq_length() == history.shape[1] + 7


@pytest.mark.parametrize("method", ["momentkv", "momentkv:paper", "h2o", "tova", "snapkv", "pyramidkv", "keydiff"])
@pytest.mark.parametrize("lengths", [(120, 70), (120, 30), (90, 1)])
def test_left_padded_rows_equal_the_rows_alone(tiny, method, lengths):
    rows = [prompt(1, n, seed=n) for n in lengths]
    width = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(r, (width - r.shape[1], 0)) for r in rows])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    together = generate(tiny, ids, compressed(tiny, 50, method), 10, attention_mask=mask)
    for row, out in zip(rows, together, strict=True):
        assert torch.equal(generate(tiny, row, compressed(tiny, 50, method), 10)[0], out)


def test_padding_inside_a_second_turn(tiny):
    """Rows whose second turns differ in length are padded in the middle of the history."""
    ids, turn = prompt(2, 100), prompt(2, 8, seed=4)
    mask = torch.ones(2, 108, dtype=torch.long)
    mask[1, 100:103] = 0
    cache, alone = compressed(tiny), compressed(tiny)
    forward(tiny, ids, cache), forward(tiny, ids[1:], alone)
    position_ids = (mask.cumsum(-1) - 1)[:, 100:].clamp(min=0)
    together = forward(tiny, turn, cache, attention_mask=mask, position_ids=position_ids)
    expected = forward(tiny, turn[1:, 3:], alone)
    torch.testing.assert_close(together[1:, -1], expected[:, -1], atol=1e-4, rtol=1e-4)
    assert torch.equal(cache.positions(1, 0, row=1), alone.positions(1, 0))


def test_assisted_decoding_is_a_clear_error(tiny):
    ids = prompt(1, 100)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": build("llama")}):
        with pytest.raises(ValueError, match=r"assisted|rolled back|cropped"):
            generate(tiny, ids.repeat(1, 2), compressed(tiny), **options)


def test_a_quantised_or_static_cache_beside_ours_is_a_clear_error(tiny):
    for implementation in ("static", "quantized", "offloaded"):
        with pytest.raises(ValueError, match="cache_implementation"):
            generate(tiny, prompt(1, 100), compressed(tiny), cache_implementation=implementation)


def test_a_history_fed_again_is_a_clear_error(tiny):
    ids = prompt(1, 100)
    with pytest.raises(ValueError, match="fed again"):
        generate(tiny, ids, compressed(tiny), 6, use_cache=False)
    cache = compressed(tiny)
    forward(tiny, ids, cache)
    with pytest.raises(ValueError, match="fed again"):
        forward(tiny, ids, cache, position_ids=torch.arange(100)[None])


def test_ordinary_caches_inside_attend_behave_as_ever(tiny):
    ids = torch.nn.functional.pad(prompt(2, 40), (5, 0))
    mask = torch.tensor([[0] * 5 + [1] * 40] * 2)
    expected = tiny.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
    with attend(tiny):
        for implementation in (None, "dynamic", "static"):
            out = tiny.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=8, cache_implementation=implementation
            )
            assert torch.equal(out, expected)
        torch.testing.assert_close(tiny(ids[:, 5:]).logits, tiny(ids[:, 5:], use_cache=False).logits)


def test_full_method_equals_the_stock_cache(tiny):
    ids = prompt(2, 60)
    expected = tiny.generate(ids, do_sample=False, max_new_tokens=10)[:, 60:]
    cache = MomentCache(tiny.config, method="full")
    assert torch.equal(generate(tiny, ids, cache, 10), expected)
    assert cache.report().tokens_per_head == 69
    out = tiny.generate(
        ids, do_sample=False, max_new_tokens=10, **cache_argument(MomentCache(tiny.config, method="full"))
    )
    assert torch.equal(out[:, 60:], expected)
