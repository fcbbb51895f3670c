"""One exact prefill, from which every method and budget can be derived."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from momentkv.compress import Chunk, candidates
from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.compat import cache_argument
from momentkv.hf.layer import MomentLayer
from momentkv.methods import METHODS
from momentkv.policies.base import Evidence
from momentkv.state import scaled

WINDOW = 64  # the largest observation window among the presets


class _Recorder(MomentLayer):
    """Keeps a prompt's keys, values and window queries instead of compressing them."""

    window: int = WINDOW
    mass: bool = False
    evidence: Evidence | None = None
    length: Tensor | None = None

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kw: Any
    ) -> Tensor:
        if self.evidence is not None:
            raise RuntimeError("a prefill takes the whole prompt in one forward pass")
        scaling = key.shape[-1] ** -0.5 if scaling is None else scaling
        self._require_finite(key, value)
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kw)
        a = scaled(query, scaling).unflatten(1, (key.shape[1], -1))
        seen = torch.zeros(key.shape[0], dtype=torch.int32, device=key.device)
        chunk = Chunk.of(key, value, a, seen, self._validity(attention_mask, key.shape[2]))
        scored = METHODS["h2o" if self.mass else "snapkv"].settings
        assert scored is not None
        self.evidence = candidates(chunk, scored, scaling, None, self.index, window=self.window)
        self.length = chunk.real
        self.pending = False
        return out


@dataclass(frozen=True)
class Prefill:
    """An exact prefill. logits: of the last token, `[b, vocabulary]`. tokens: columns, padding included.

    layers: per cache layer the evidence for compression, or the layer itself where it is not compressed.
    lengths: real tokens of each row, `[b]`.
    """

    config: PreTrainedConfig
    layers: list[Any]
    logits: Tensor
    tokens: int
    lengths: Tensor

    def compress(
        self, budget: Any = 128, method: str = "momentkv", preset: str | None = None, **options: Any
    ) -> MomentCache:
        """The cache that a live prefill with these arguments (see `MomentCache`) would have left. May be called often.

        Raises:
            ValueError: as MomentCache; also for a window larger than the prefill recorded, or for H2O when it did
            not record the accumulated attention (`prefill(..., mass=True)`).
        """
        cache = MomentCache(self.config, budget, method, preset, **options)
        for i, recorded in enumerate(self.layers):
            fresh = cache.layers[i]
            if not isinstance(recorded, Evidence):
                cache.layers[i] = copy.deepcopy(recorded)
            elif isinstance(fresh, MomentLayer):
                self._check(fresh, recorded)
                cache.layers[i] = MomentLayer.filled(fresh, recorded, self.lengths, self.tokens)
            elif isinstance(fresh, DynamicLayer):
                fresh.update(*self._full(recorded))
        return cache

    def _full(self, e: Evidence) -> tuple[Tensor, Tensor]:
        if int(self.lengths.min()) != self.tokens:
            raise ValueError("method 'full' from a padded prefill is not possible: prefill the rows one by one")
        return e.keys, e.values

    @staticmethod
    def _check(layer: MomentLayer, e: Evidence) -> None:
        settings = layer.plan.settings
        if settings.window > e.queries.shape[-2] and e.queries.shape[-2] < int(e.query_positions.max()) + 1:
            raise ValueError(f"window={settings.window}, but the prefill recorded {e.queries.shape[-2]} queries")
        if settings.policy.needs_mass and e.mass is None:
            raise ValueError("h2o needs the accumulated attention: prefill(..., mass=True)")


@torch.no_grad()
def prefill(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, *, window: int = WINDOW, mass: bool = False
) -> Prefill:
    """Run a prompt once with exact attention and keep what every method needs (the memory of a full cache).

    Args:
        model: a transformers model; `attend` is applied here. input_ids: `[b, n]`.
        attention_mask: `[b, n]`, 0 for padding. window: queries to record. mass: also the attention accumulated
        over all queries, which H2O needs and which takes a second pass over the attention.
    """
    cache = MomentCache(model.config, method="snapkv")
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, MomentLayer):
            recorder = _Recorder(layer.plan, layer.rank, layer.index)
            recorder.window, recorder.mass = window, mass
            cache.layers[i] = recorder
    with attend(model):
        logits = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument(cache),
        ).logits[:, -1]
    layers = [layer.evidence if isinstance(layer, _Recorder) else layer for layer in cache.layers]
    recorded = [layer.length for layer in cache.layers if isinstance(layer, _Recorder) and layer.length is not None]
    lengths = recorded[0] if recorded else torch.full((input_ids.shape[0],), input_ids.shape[1])
    return Prefill(model.config, layers, logits, input_ids.shape[1], lengths)
