"""A saved cache goes on exactly where it stopped, in any process, or is refused with the reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from conftest import build, prompt
from helpers import assert_same_state, compressed, forward, generate
from momentkv import METHODS
from momentkv.hf import CacheFileError, MomentCache


@pytest.fixture
def saved(tiny, tmp_path):
    cache = compressed(tiny)
    forward(tiny, prompt(1, 100), cache)
    cache.save(tmp_path / "doc.safetensors", token_ids=prompt(1, 100))
    return cache, tmp_path / "doc.safetensors"


@pytest.mark.parametrize("method", [*METHODS, "momentkv:paper", "snapkv:scripts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_tokens_as_without_the_detour(tmp_path, method, dtype):
    model, ids = build("llama").to(dtype), prompt(2, 100)
    cache = compressed(model, 80, method)
    first = generate(model, ids, cache, 8)
    cache.save(tmp_path / "c.safetensors")
    loaded = MomentCache.load(tmp_path / "c.safetensors", model.config)
    more = torch.cat([ids, first, prompt(2, 5, seed=9)], 1)
    assert torch.equal(generate(model, more, loaded, 20), generate(model, more, cache, 20))
    assert loaded.method == cache.method and loaded.budget == cache.budget and loaded.settings == cache.settings


@pytest.mark.parametrize("budget", [0.6, "110te", "100KiB"])
@pytest.mark.parametrize(
    "options", [{}, {"mass": "variance", "interval": 4}, {"moments": "raw-bfloat16"}, {"kernel": 5}]
)
def test_budgets_and_options_survive(tiny, tmp_path, budget, options):
    cache = compressed(tiny, budget, **options)
    generate(tiny, prompt(1, 100), cache, 8)
    cache.save(tmp_path / "c.safetensors")
    loaded = MomentCache.load(tmp_path / "c.safetensors", tiny.config, budget=budget, method="momentkv")
    assert loaded.settings == cache.settings
    assert_same_state(cache, loaded, atol=0, rtol=0)


def test_hybrid_models_and_unused_caches(tmp_path, recwarn):
    model, ids = build("gemma3"), prompt(1, 100)
    cache = compressed(model)
    cache.save(tmp_path / "empty.safetensors")
    assert torch.equal(
        generate(model, ids, MomentCache.load(tmp_path / "empty.safetensors", model.config)),
        generate(model, ids, cache),
    )
    cache.save(tmp_path / "c.safetensors")
    loaded = MomentCache.load(tmp_path / "c.safetensors", model.config)
    step = prompt(1, 1)
    torch.testing.assert_close(forward(model, step, loaded), forward(model, step, cache), atol=0, rtol=0)


def test_another_process_reads_the_same(tiny, saved):
    cache, path = saved
    code = f"""
import sys; sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
from conftest import build, prompt
from helpers import generate
from momentkv.hf import MomentCache
import torch
model = build("llama")
cache = MomentCache.load({str(path)!r}, model.config)
ids = torch.cat([cache.token_ids, prompt(1, 5, seed=2)], 1)
print(generate(model, ids, cache).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    ids = torch.cat([prompt(1, 100), prompt(1, 5, seed=2)], 1)
    assert json.loads(done.stdout) == generate(tiny, ids, cache).tolist()


@pytest.mark.parametrize(
    "expected, reason",
    [
        ({"budget": 64}, "budget 44, not 64"),
        ({"method": "snapkv"}, "method 'momentkv', not 'snapkv'"),
        ({"method": "momentkv", "preset": "paper"}, "not 'momentkv:paper'"),
        ({"method": "momentkv:paper"}, "not 'momentkv:paper'"),
        ({"preset": "paper"}, "not 'momentkv:paper'"),
    ],
)
def test_another_budget_or_method_is_refused(tiny, saved, expected, reason):
    with pytest.raises(CacheFileError, match=reason):
        MomentCache.load(saved[1], tiny.config, **expected)
    with pytest.raises(ValueError, match="no option budgte"):
        MomentCache.load(saved[1], tiny.config, budgte=3)


def test_another_model_or_version_is_refused(saved, tmp_path):
    with pytest.raises(CacheFileError, match=r"another model.*num_hidden_layers"):
        MomentCache.load(saved[1], build("llama", num_hidden_layers=2).config)
    with pytest.raises(CacheFileError, match=r"another model.*model_type"):
        MomentCache.load(saved[1], build("qwen2").config)
    model = build("llama")
    header, tensors = _open(saved[1])
    for key, value, reason in (("format", 99, "format 99"), ("budget", "64", "altered")):
        changed = {**header, "momentkv": json.dumps(json.loads(header["momentkv"]) | {key: value})}
        save_file(tensors, tmp_path / "x.safetensors", changed)
        with pytest.raises(CacheFileError, match=reason):
            MomentCache.load(tmp_path / "x.safetensors", model.config)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CacheFileError, match="not a saved cache"):
        MomentCache.load(tmp_path / "x.safetensors", model.config)


def _open(path):
    with safe_open(path, "pt") as f:
        return dict(f.metadata()), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118


def test_a_cut_or_altered_file_never_loads(tiny, saved, tmp_path):
    data = saved[1].read_bytes()
    bad = tmp_path / "bad.safetensors"
    for size in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:size])
        with pytest.raises(CacheFileError):
            MomentCache.load(bad, tiny.config)
    for place in range(0, len(data), max(1, len(data) // 60)):
        changed = bytearray(data)
        changed[place] ^= 0x10
        bad.write_bytes(changed)
        with pytest.raises(CacheFileError):
            MomentCache.load(bad, tiny.config)
    with pytest.raises(CacheFileError, match="not a file"):
        MomentCache.load(tmp_path / "none", tiny.config)


def test_writing_is_atomic(saved, monkeypatch):
    from momentkv.hf import saving

    cache, path = saved
    before = path.read_bytes()

    def fails(tensors, target, metadata):
        Path(target).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(saving, "save_file", fails)
    with pytest.raises(OSError, match="no space"):
        cache.save(path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]
    with pytest.raises(CacheFileError, match="is a folder"):
        cache.save(path.parent)
    with pytest.raises(CacheFileError, match="does not exist"):
        cache.save(path.parent / "nowhere" / "c.safetensors")
