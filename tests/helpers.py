"""What several transformers tests do."""

import os
from pathlib import Path

import torch

from momentkv.hf import MomentCache, attend
from momentkv.hf.compat import cache_argument


def generate(model, ids, cache, tokens: int = 12, **options) -> torch.Tensor:
    """Greedy by default; returns the new tokens only."""
    options = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0} | options
    with attend(model):
        out = model.generate(ids, **cache_argument(cache), **options)
    return out[:, ids.shape[1] :]


def forward(model, ids, cache, **options) -> torch.Tensor:
    """Logits of one forward pass."""
    with attend(model), torch.no_grad():
        return model(ids, **cache_argument(cache), use_cache=True, **options).logits


def compressed(model, budget=44, method="momentkv", **options) -> MomentCache:
    return MomentCache(model.config, budget, method, **options)


def states(cache) -> list[dict[str, torch.Tensor]]:
    """Copies of all tensors of all compressed layers."""
    return [{k: x.clone() for k, x in layer.state.tensors().items()} for layer in cache.moment_layers]


def assert_same_state(a, b, **tolerance) -> None:
    for x, y in zip(states(a), states(b), strict=True):
        assert x.keys() == y.keys()
        for name in x:
            torch.testing.assert_close(x[name], y[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def shared_data() -> Path | None:
    """The folder of LongBench and RULER material: `$MOMENTKV_DATA`, else one beside the repository; None without."""
    given = os.environ.get("MOMENTKV_DATA")
    folder = Path(given) if given else Path(__file__).parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None
