"""What cannot be right is refused, in one clear sentence, before it does harm."""

import subprocess
import sys

import pytest
import torch
import transformers

from conftest import SIZES, build, prompt
from helpers import compressed, forward, generate
from momentkv.hf import MomentCache, attend
from momentkv.hf.compat import cache_argument


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_cache_that_attention_ignores_raises_in_the_first_forward_pass(implementation):
    model = build("llama")
    model.set_attn_implementation(implementation)
    with pytest.raises(RuntimeError, match=r"momentkv\.hf\.attend"):
        model(prompt(1, 100), use_cache=True, **cache_argument(compressed(model)))
    with pytest.raises(RuntimeError, match=r"momentkv\.hf\.attend"):
        model.generate(prompt(1, 100), max_new_tokens=3, **cache_argument(compressed(model)))


def test_an_interrupted_pass_poisons_only_its_cache(tiny):
    cache = compressed(tiny)
    hook = tiny.model.layers[1].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        forward(tiny, prompt(1, 100), cache)
    hook.remove()
    assert tiny.config._attn_implementation == "sdpa"
    forward(tiny, prompt(1, 100), compressed(tiny))
    with pytest.raises(RuntimeError, match=r"interrupted|differ"):
        forward(tiny, prompt(1, 1), cache)
    cache.reset()
    forward(tiny, prompt(1, 100), cache)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"budget": 0}, "budget=0"),
        ({"budget": -5}, "budget=-5"),
        ({"budget": True}, "budget=True"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"budget": "lots"}, "'lots'.*MiB"),
        ({"budget": "12xb"}, "'12xb'.*128te"),
        ({"budget": 36}, "36.*37 tokens"),
        ({"budget": 10**12}, "1,000,000,000,000 tokens.*method='full'"),
        ({"budget": 128, "method": "snapvk"}, "'snapvk'.*snapkv"),
        ({"budget": 128, "preset": "papper"}, "'papper'.*paper"),
        ({"budget": 128, "method": "momentkv:papper"}, "'papper'.*paper"),
        ({"budget": 128, "correction": "second"}, "'second'.*zeroth"),
        ({"budget": 128, "mass": "gauss"}, "'gauss'.*jensen"),
        ({"budget": 128, "windw": 3}, "'windw'.*window"),
        ({"budget": 128, "window": 0}, "window=0"),
        ({"budget": 128, "window": 200}, "128.*205 tokens"),
        ({"budget": 128, "kernel": 4}, "kernel=4.*odd"),
        ({"budget": 128, "alpha": 2}, "alpha=2"),
        ({"budget": 128, "method": "full", "window": 3}, "full.*window"),
    ],
)
def test_impossible_options_are_quoted_and_answered(tiny, options, named):
    with pytest.raises(ValueError, match=named):
        MomentCache(tiny.config, **options)


def test_a_byte_budget_too_small_for_the_summary_says_the_least(tiny):
    cache = MomentCache(tiny.config, "20te")
    with pytest.raises(ValueError, match=r"20te.*at least \"(\d+)te\"") as error:
        forward(tiny, prompt(1, 100), cache)
    least = str(error.value).split('at least "')[1].rstrip('"')
    forward(tiny, prompt(1, 100), MomentCache(tiny.config, least))


def test_a_share_of_a_chunked_prompt_needs_its_length(tiny):
    ids = prompt(1, 200)
    with pytest.raises(ValueError, match="prompt_tokens"):
        generate(tiny, ids, compressed(tiny, 0.4), prefill_chunk_size=64)
    cache = compressed(tiny, 0.4, prompt_tokens=200)
    generate(tiny, ids, cache, 4, prefill_chunk_size=64)
    assert cache.report().tokens_per_head == 80
    later = compressed(tiny, 0.4)  # a new turn after decoding is no chunk of the prompt
    first = generate(tiny, ids, later, 4)
    generate(tiny, torch.cat([ids, first, prompt(1, 6)], 1), later, 4)
    assert later.report().tokens_per_head == 80


def test_short_prompts_with_any_share_keep_at_least_something(tiny):
    for share in (0.001, 0.1, 1.0):
        cache = compressed(tiny, share)
        assert forward(tiny, prompt(1, 5), cache).isfinite().all()
        assert cache.report().tokens_per_head == 5


def test_non_finite_values_are_reported_where_they_arise():
    model = build("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="values reached layer 1"):
        forward(model, prompt(1, 100), compressed(model))
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = 0
    cache = compressed(model)
    forward(model, prompt(1, 100), cache)
    model.model.layers[2].self_attn.k_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="keys reached layer 2"):
        forward(model, prompt(1, 1), cache)


def test_a_batch_of_another_size_and_custom_masks_are_refused(tiny):
    cache = compressed(tiny)
    forward(tiny, prompt(2, 100), cache)
    with pytest.raises(ValueError, match="batch of 2, not of 1"):
        forward(tiny, prompt(1, 1), cache)
    cache = compressed(tiny)
    forward(tiny, prompt(1, 100), cache)
    with pytest.raises(ValueError, match="custom 4D"):
        forward(tiny, prompt(1, 3), cache, attention_mask=torch.zeros(1, 1, 3, 103))


def test_a_cache_for_another_depth_is_refused(tiny):
    shallow = build("llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match="made for a model of 2 layers, but layer 2"):
        forward(tiny, prompt(1, 100), compressed(shallow))
    with pytest.raises(ValueError, match="method='full'"):
        forward(tiny, prompt(1, 100), compressed(tiny, "16777216MiB"))


def test_pipelines_take_the_cache(tiny, tmp_path):
    """`transformers.pipeline` passes the cache on to generate."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0} | {f"w{i}": i for i in range(1, 128)}, "w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    pipe = transformers.pipeline("text-generation", model=tiny, tokenizer=tokenizer)
    text = " ".join(f"w{i}" for i in prompt(1, 100)[0].tolist())
    cache = compressed(tiny)
    with attend(tiny):
        out = pipe(text, max_new_tokens=6, do_sample=False, return_full_text=False, **cache_argument(cache))
    expected = tokenizer.decode(generate(tiny, prompt(1, 100), compressed(tiny), 6)[0])
    assert out[0]["generated_text"].split() == expected.split()
    assert cache.report().tokens_per_head == 44


def test_models_whose_attention_has_more_in_it_are_refused():
    gemma2 = transformers.Gemma2Config(**SIZES, head_dim=16)
    with pytest.raises(NotImplementedError, match="attn_logit_softcapping=50"):
        MomentCache(gemma2)
    gpt_oss = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    )
    with pytest.raises(TypeError, match="attention sinks"), attend(gpt_oss):
        pass
    with pytest.raises(ValueError, match="encoder-decoder"):
        MomentCache(transformers.T5Config())
    with pytest.raises(TypeError, match="transformers model"), attend(torch.nn.Linear(2, 2)):
        pass


def test_extra_attention_arguments_are_never_ignored(tiny):
    from momentkv.hf.attention import refuse_extras

    for extra in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(NotImplementedError, match=extra):
            refuse_extras({extra: torch.ones(1)})


@pytest.mark.filterwarnings("default")
def test_windowed_layers_are_left_alone_and_that_is_said_once():
    from momentkv.hf import cache as module

    module._announced.clear()
    model, ids = build("gemma3"), prompt(1, 100)
    with pytest.warns(UserWarning, match="2 of 4 layers of this 'gemma3_text' model"):
        cache = MomentCache(model.config, 44)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MomentCache(model.config, 44)
    generate(model, ids, cache, 10)
    report = cache.report()
    assert [x.compressed for x in report.layers] == [False, True, False, True]
    assert (report.layers[0].tokens == [[23]] and report.layers[1].tokens == [[44, 44]]) or report.tokens_per_head == 44
    full = MomentCache(model.config, 1000)
    generate(model, ids, full, 10)
    assert torch.equal(full.layers[0].keys, full.layers[0].keys) and full.report().layers[0].tokens == [[23]]


def test_importing_the_core_loads_nothing_heavy_and_importing_hf_patches_nothing():
    code = """
import sys, momentkv
heavy = [m for m in ("transformers", "triton", "matplotlib", "datasets", "rich", "safetensors") if m in sys.modules]
assert not heavy, heavy
import transformers
before = dict(transformers.AttentionInterface._global_mapping)
import momentkv.hf
assert dict(transformers.AttentionInterface._global_mapping) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
