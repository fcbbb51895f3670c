"""Small models of every supported family, and the real ones where they are built."""

import os
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

SHAPED = ("state", "moments", "correction", "selection", "store", "policies.base")
install_import_hook([f"momentkv.{m}" for m in SHAPED], "beartype.beartype")  # shapes in signatures, checked in tests

torch.set_num_threads(1)  # the models here are tiny: threads would only wait for each other
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3", "gemma3")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build(family: str, **changes):
    """A random model of the family: 3 layers, 4 query heads, 2 KV heads."""
    import transformers as t

    kinds = {
        "llama": (t.LlamaConfig, t.LlamaForCausalLM, {}),
        "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM, {}),
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM, {"head_dim": 16}),
        "mistral": (t.MistralConfig, t.MistralForCausalLM, {"sliding_window": None}),
        "phi3": (t.Phi3Config, t.Phi3ForCausalLM, {}),
        "smollm3": (t.SmolLM3Config, t.SmolLM3ForCausalLM, {}),
        "gemma3": (
            t.Gemma3TextConfig,
            t.Gemma3ForCausalLM,
            {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
    }
    config_class, model_class, own = kinds[family]
    sizes = SIZES | ({"num_hidden_layers": 4} if family == "gemma3" else {})
    torch.manual_seed(7)
    config = config_class(**(sizes | own | changes))
    config._attn_implementation = "sdpa"
    model = model_class(config).eval()
    for p in model.parameters():  # larger weights: attention that is not flat
        if p.dim() > 1:
            p.data *= 4
    return model


def prompt(rows: int = 1, length: int = 60, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def tiny():
    """A random Llama, shared by tests that do not change it."""
    return build("llama")


def real_model(name: str) -> Path:
    """Folder of a real model: the demo model, or one of `$MOMENTKV_TEST_MODELS`; skips where it is not built."""
    from momentkv.hf import models

    folder = models.cache_dir() / models.DEMO_NAME if name == "smollm2" else None
    if folder is None or not (folder / "config.json").is_file():
        folder = Path(os.environ.get("MOMENTKV_TEST_MODELS", "/nonexistent")) / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"the real model {name!r} is not built here")
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """Real SmolLM2-135M-Instruct in fp32 and its tokenizer."""
    from momentkv.hf.models import load

    return load(str(real_model("smollm2")), dtype="float32")


@pytest.fixture(scope="session")
def reference_text() -> str:
    """A long real text: the Python language reference of the standard library."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
