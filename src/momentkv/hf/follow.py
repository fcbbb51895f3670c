"""Tokens after an exact prefill, read with exact attention: the reference for what a compressed cache makes of them."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.compat import cache_argument
from momentkv.hf.layer import MomentLayer
from momentkv.hf.prefill import Prefill
from momentkv.policies.base import Evidence
from momentkv.state import scaled


class _Follower(MomentLayer):
    """Attends exactly to a prompt and what follows it, and records both."""

    evidence: Evidence
    projection: Tensor | None = None

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kw: Any
    ) -> Tensor:
        scaling = key.shape[-1] ** -0.5 if scaling is None else scaling
        self._require_finite(key, value)
        e, new = self.evidence, key.shape[2]
        keys, values = torch.cat([e.keys, key], dim=2), torch.cat([e.values, value], dim=2)
        at = torch.arange(keys.shape[2], device=keys.device)
        mask = at <= at[-new:, None]
        out, _ = sdpa_attention_forward(module, query, keys, values, mask[None, None], scaling=scaling, **kw)
        positions = at.int().expand(*keys.shape[:2], -1)
        self.evidence = replace(
            e,
            keys=keys,
            values=values,
            positions=positions,
            valid=torch.ones_like(positions, dtype=torch.bool),
            queries=scaled(query, scaling).unflatten(1, (keys.shape[1], -1)),
            query_positions=at[-new:].int().unsqueeze(0),
            mass=None,
        )
        projection = getattr(module, "o_proj", None)
        self.projection = getattr(projection, "weight", None)
        self.pending = False
        return out


@dataclass(frozen=True)
class Follow:
    """The exact continuation. logits: `[f, vocabulary]`, after each of the `f` tokens.

    layers: per compressed layer its index and the evidence of prompt and continuation, whose queries are those of the
    continuation. projections: the attention's output weights `[hidden, heads * d_v]`, or None where a model has none.
    """

    logits: Tensor
    layers: list[tuple[int, Evidence]]
    projections: list[Tensor | None]


@torch.no_grad()
def follow(model: Any, exact: Prefill, token_ids: Tensor) -> Follow:
    """Read `token_ids` `[1, f]` after an unpadded prefill of one row, in one pass with exact attention."""
    cache = MomentCache(exact.config, method="snapkv")
    for i, recorded in enumerate(exact.layers):
        fresh = cache.layers[i]
        if not isinstance(recorded, Evidence):
            cache.layers[i] = copy.deepcopy(recorded)
        elif isinstance(fresh, MomentLayer):
            follower = _Follower(fresh.plan, fresh.rank, fresh.index)
            follower.evidence, follower._seen = recorded, exact.tokens
            follower.device, follower.is_initialized = recorded.keys.device, True
            cache.layers[i] = follower
    with attend(model):
        logits = model(input_ids=token_ids, use_cache=True, **cache_argument(cache)).logits[0]
    followers = [(i, layer) for i, layer in enumerate(cache.layers) if isinstance(layer, _Follower)]
    layers = [(i, layer.evidence) for i, layer in followers]
    return Follow(logits, layers, [layer.projection for _, layer in followers])
