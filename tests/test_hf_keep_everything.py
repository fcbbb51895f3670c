"""A budget that evicts nothing must equal transformers' own cache, for every supported family."""

import pytest
import torch
from transformers import DynamicCache

from conftest import FAMILIES, build, prompt, real_model
from helpers import forward, generate
from momentkv.hf import MomentCache
from momentkv.hf.compat import cache_argument


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["momentkv", "momentkv:paper", "h2o"])
def test_logits_and_tokens_equal_the_stock_cache(family, method, recwarn):
    model, ids = build(family), prompt(2, 50)
    stock, ours = DynamicCache(config=model.config), MomentCache(model.config, 1000, method)
    pieces = [ids[:, :30], ids[:, 30:31], ids[:, 31:32], ids[:, 32:]]  # prompt, two decode steps, another chunk
    for piece in pieces:
        expected = model(piece, **cache_argument(stock)).logits
        torch.testing.assert_close(forward(model, piece, ours), expected, atol=1e-4, rtol=1e-4)
    expected = model.generate(ids, do_sample=False, max_new_tokens=64)[:, 50:]
    assert torch.equal(generate(model, ids, MomentCache(model.config, 1000, method), 64), expected)


@pytest.mark.parametrize("name", ["smollm2", "qwen", "gemma"])
def test_real_models(name, reference_text, recwarn):
    from momentkv.hf.models import load

    model, tokenizer = load(str(real_model(name)), dtype="float32")
    ids = tokenizer(reference_text[:3000], return_tensors="pt").input_ids[:, :400]
    expected = model.generate(ids, do_sample=False, max_new_tokens=64)[:, 400:]
    assert torch.equal(generate(model, ids, MomentCache(model.config, 4000), 64), expected)
    stock = model(ids).logits
    torch.testing.assert_close(forward(model, ids, MomentCache(model.config, 4000)), stock, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_run_and_keep_their_dtype(dtype):
    model, ids = build("llama").to(dtype), prompt(1, 90)
    cache = MomentCache(model.config, 44)
    logits = forward(model, ids, cache)
    for _ in range(6):
        logits = forward(model, logits[:, -1:].argmax(-1), cache)
        assert logits.dtype == dtype and logits.isfinite().all()
    state = cache.moment_layers[0].state
    assert state.keys.dtype == dtype and state.summary["mean_k"].dtype == torch.float32
