"""A cache as one safetensors file: written atomically, checked before anything is believed."""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from momentkv.budgets import Budget
from momentkv.hf.cache import MomentCache
from momentkv.hf.layer import MomentLayer
from momentkv.layer import LayerState
from momentkv.methods import settings_for

FORMAT = 1
_MODEL_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "layer_types", "sliding_window", "rope_parameters",
)  # fmt: skip


class CacheFileError(ValueError):
    """A cache file that cannot be used: damaged, or made for another model, budget, method or version."""


def _fingerprint(config: PreTrainedConfig) -> dict[str, Any]:
    text = config.get_text_config(decoder=True)
    return json.loads(json.dumps({name: getattr(text, name, None) for name in _MODEL_FIELDS}, default=str))


def _digest(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    h = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        h.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        h.update(x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return h.hexdigest()


def _layer_tensors(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if isinstance(layer, MomentLayer):
        if layer.pending:
            raise CacheFileError("the last forward pass did not finish: this cache cannot be saved")
        if layer.state is None:
            return {}, {}
        return layer.state.tensors(), {"seen": layer._seen, "in_prompt": layer._in_prompt}
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        if not layer.is_initialized:
            return {}, {}
        return {"keys": layer.keys, "values": layer.values}, {"seen": layer.get_seq_length()}
    raise CacheFileError(f"saving a {type(layer).__name__} is not supported")


def save(cache: MomentCache, path: str | os.PathLike[str], token_ids: Tensor | None = None) -> None:
    """Write `cache` to `path`; a crash leaves the old file or none, never half of one."""
    tensors: dict[str, Tensor] = {}
    layers = []
    for i, layer in enumerate(cache.layers):
        own, host = _layer_tensors(layer)
        tensors.update({f"layer.{i}.{name}": x.detach().contiguous().clone() for name, x in own.items()})
        layers.append(host)
    if token_ids is not None:
        tensors["token_ids"] = token_ids.detach().clone()
    header = {
        "format": FORMAT,
        "model": _fingerprint(cache.config),
        "method": cache.method,
        "budget": str(cache.budget),
        "prompt_tokens": cache.prompt_tokens,
        "settings": dataclasses.asdict(cache.settings) if cache.settings else None,
        "layers": layers,
    }
    metadata = {"momentkv": json.dumps(header), "sha256": _digest(header, tensors)}
    target = Path(path)
    if not target.parent.is_dir():
        raise CacheFileError(f"cannot save to {str(target)!r}: the folder {str(target.parent)!r} does not exist")
    if target.is_dir():
        raise CacheFileError(f"cannot save to {str(target)!r}: it is a folder")
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise CacheFileError(f"{str(path)!r} is not a file")
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CacheFileError(f"{str(path)!r} is cut short, damaged or no cache file: {error}") from error
    if "momentkv" not in metadata:
        raise CacheFileError(f"{str(path)!r} is a safetensors file, but not a saved cache")
    try:
        header = json.loads(metadata["momentkv"])
    except ValueError as error:
        raise CacheFileError(f"{str(path)!r} was altered: its header cannot be read") from error
    if header.get("format") != FORMAT:
        raise CacheFileError(f"{str(path)!r} has format {header.get('format')!r}; this version reads format {FORMAT}")
    if _digest(header, tensors) != metadata.get("sha256"):
        raise CacheFileError(f"{str(path)!r} was altered: its checksum does not match")
    return header, tensors


def _check(path: Path, header: dict[str, Any], config: PreTrainedConfig, expected: dict[str, Any]) -> None:
    here = _fingerprint(config)
    if differing := [
        f"{k}: {header['model'].get(k)!r} in the file, {here[k]!r} here"
        for k in here
        if header["model"].get(k) != here[k]
    ]:
        raise CacheFileError(f"{str(path)!r} was made with another model ({'; '.join(differing)})")
    unknown = set(expected) - {"budget", "method", "preset"}
    if unknown:
        raise ValueError(f"load() has no option {', '.join(sorted(unknown))}; valid: device, budget, method, preset")
    if expected.get("budget") is not None and str(Budget.parse(expected["budget"])) != header["budget"]:
        raise CacheFileError(f"{str(path)!r} has budget {header['budget']}, not {expected['budget']}")
    made = header["method"]
    name, preset = made.partition(":")[::2]
    method, wanted = expected.get("method"), expected.get("preset")
    if method is not None and ":" in method:
        method, wanted = method.partition(":")[::2]
    elif method is not None:
        wanted = wanted or ""  # a method without a preset means our defaults
    if (method is not None and method != name) or (wanted is not None and wanted != preset):
        given = f"{method or name}:{wanted}" if wanted else method
        raise CacheFileError(f"{str(path)!r} was made by method {made!r}, not {given!r}")


def load(path: str | os.PathLike[str], config: PreTrainedConfig, device: Any, expected: dict[str, Any]) -> MomentCache:
    """Read what `save` wrote, or raise CacheFileError with the reason."""
    path = Path(path)
    header, tensors = _read(path)
    _check(path, header, config, expected)
    plain = settings_for(header["method"])
    changed = (
        {} if header["settings"] is None else {k: v for k, v in header["settings"].items() if v != getattr(plain, k)}
    )
    cache = MomentCache(config, header["budget"], header["method"], prompt_tokens=header["prompt_tokens"], **changed)
    for i, (layer, host) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        prefix = f"layer.{i}."
        own = {n.removeprefix(prefix): x.to(device) for n, x in tensors.items() if n.startswith(prefix)}
        if not own:
            continue
        if isinstance(layer, MomentLayer):
            layer.state = LayerState.from_tensors(own)
            layer.lazy_initialization(own["keys"], own["values"])
            layer._seen, layer._in_prompt = host["seen"], host["in_prompt"]
        elif isinstance(layer, DynamicLayer):
            layer.lazy_initialization(own["keys"], own["values"])
            layer.keys, layer.values = own["keys"], own["values"]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = host["seen"]
    cache.token_ids = tensors.get("token_ids")
    return cache
