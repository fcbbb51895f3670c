"""One compressed layer of a MomentCache: what transformers calls, and nothing of the method itself."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from momentkv.compress import Chunk, candidates, compress
from momentkv.decode import decode
from momentkv.hf.attention import tag
from momentkv.hf.plan import Plan
from momentkv.layer import LayerState, with_correction
from momentkv.policies.base import Evidence
from momentkv.state import attend, scaled


class MomentLayer(CacheLayerMixin):
    """State of one layer (`state`, None before the first update) behind transformers' layer interface."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, plan: Plan, rank: int, index: int) -> None:
        super().__init__()
        self.plan, self.rank, self.index = plan, rank, index
        self.state: LayerState | None = None
        self.pending = False
        self._seen = 0  # columns seen, padding included: what transformers slices by
        self._in_prompt = True  # no decode step since the first update

    @classmethod
    def filled(cls, like: "MomentLayer", evidence: Evidence, seen: Tensor, columns: int) -> "MomentLayer":
        """A layer that has just seen a prompt of `columns` columns, given as evidence (see `momentkv.hf.prefill`)."""
        layer = cls(like.plan, like.rank, like.index)
        layer._fill(evidence, seen)
        layer._seen, layer.device = columns, evidence.keys.device
        layer.is_initialized = True
        return layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tag the new keys with this layer and return them: what is retained is read by `attend` alone."""
        self._check_update(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.pending = True
        self._seen += key_states.shape[-2]
        return tag(key_states, self), value_states

    def _check_update(self, key_states: Tensor) -> None:
        several = key_states.shape[-2] > 1
        if self.state is None:
            return
        if key_states.shape[0] != self.state.keys.shape[0]:
            raise ValueError(
                f"this cache holds a batch of {self.state.keys.shape[0]}, not of {key_states.shape[0]}: "
                "use a new cache, or batch_repeat_interleave / batch_select_indices"
            )
        if key_states.dtype != self.state.keys.dtype:
            raise ValueError(
                f"this cache holds {self.state.keys.dtype}, but the model gives {key_states.dtype}: "
                "load the model with the cache's dtype"
            )
        share = self.plan.budget.kind == "share" and self.plan.prompt_tokens is None
        if share and several and self._in_prompt:
            raise ValueError(
                f"budget={self.plan.budget} is a share of the prompt, but the prompt comes in chunks: "
                "pass prompt_tokens=N, or a budget in tokens or bytes"
            )
        self._in_prompt &= several

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention over everything seen; the new tokens join the state. Returns `[b, q, heads, d_v]`."""
        batch, heads, new, d = key.shape
        scaling = d**-0.5 if scaling is None else scaling
        valid = self._validity(attention_mask, new)
        self._require_finite(key, value)
        if self.state is not None and new > 1 and self.rank == 0:
            self._require_new_positions(kwargs.get("position_ids"), new if valid is None else valid.sum(-1))
        if self.state is None:
            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        a = scaled(query, scaling).unflatten(1, (heads, -1))
        if self.state is not None and new == 1:
            real = torch.ones(batch, dtype=torch.bool, device=key.device) if valid is None else valid[:, 0]
            exact = decode(self.state, self.plan.settings, a, key[:, :, 0], value[:, :, 0], real, scaling, self.index)
            out = self._to_model(exact.out, query)
        else:
            attended = self._chunk(a, key, value, valid, scaling)
            out = out if attended is None else self._to_model(attended, query)
        self.pending = False
        return out

    @staticmethod
    def _to_model(out: Tensor, query: Tensor) -> Tensor:
        return out.flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()

    def _chunk(self, a: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scaling: float) -> Tensor | None:
        """Compress a prompt or a later chunk of one; for the latter also its attention output."""
        settings, old = self.plan.settings, self.state
        seen = old.seen if old is not None else torch.zeros(key.shape[0], dtype=torch.int32, device=key.device)
        with torch.no_grad():
            chunk = Chunk.of(key, value, a, seen, valid)
            e = candidates(chunk, settings, scaling, old, self.index)
            out = None
            if old is not None:
                mask = e.valid.unsqueeze(2) & (e.positions.unsqueeze(2) <= chunk.query_positions[:, None, :, None])
                exact = attend(a, e.keys, e.values, mask.unsqueeze(2))
                out = with_correction(exact, old, settings, a).out
            self._fill(e, seen + chunk.real)
        return out

    def _fill(self, e: Evidence, seen: Tensor) -> None:
        if self.state is None:
            tokens = self.plan.tokens(self.rank, seen.long(), e.keys, e.values)
        else:
            tokens = self.state.budget.long()
        self.state = compress(e, self.plan.settings, tokens, seen, self.state)

    def _validity(self, mask: Tensor | None, new: int) -> Tensor | None:
        """Which new tokens are real, `[b, m]`, from the model's mask; None when all are."""
        if mask is None:
            return None
        if mask.dim() != 4 or mask.shape[-1] != new or mask.shape[-2] != new:
            raise ValueError(
                f"attention mask of shape {tuple(mask.shape)} for {new} new tokens: a MomentCache takes the usual 2D "
                "mask of the whole history, not a custom 4D one"
            )
        last = mask[:, 0, -1]
        valid = last if last.dtype == torch.bool else last == 0
        if new == 1:
            return valid  # no host synchronisation per decode step
        return None if bool(valid.all()) else valid

    def _require_new_positions(self, position_ids: Tensor | None, real: int | Tensor) -> None:
        """A history fed again (as `use_cache=False` does) would be counted twice: its positions give it away."""
        if position_ids is None or position_ids.dim() != 2 or self.state is None:
            return
        if bool((position_ids.amax(-1) < self.state.seen + real - 1).any()):
            raise ValueError(
                f"{position_ids.shape[-1]} tokens came at positions up to {int(position_ids.max())}, but this cache "
                f"has seen {int(self.state.seen.max())}: the history was fed again (use_cache=False does that)"
            )

    def _require_finite(self, key: Tensor, value: Tensor) -> None:
        if key.device.type != "cpu" and key.shape[-2] == 1:
            return  # no host synchronisation per decode step
        if not bool(torch.isfinite(key.sum() + value.sum())):
            bad = "keys" if not bool(torch.isfinite(key).all()) else "values"
            if bool(torch.isfinite(key).all()) and bool(torch.isfinite(value).all()):
                return  # only the sum overflowed
            raise FloatingPointError(f"non-finite {bad} reached layer {self.index} at token {self._seen - 1}")

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: positions and slicing go by it, not by what is held."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask: only the new tokens, since what is retained differs from head to head."""
        return query_length, self._seen

    def get_max_length(self) -> int:
        """-1: any number of tokens can be seen."""
        return -1

    def reset(self) -> None:
        self.__init__(self.plan, self.rank, self.index)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do for 0, the only value that MomentCache lets through."""

    def _map(self, f: Any) -> None:
        if self.state is not None:
            self.state = self.state.map(f)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the given rows."""
        self._map(lambda x: x[indices.to(x.device), ...])

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda x: x.to(self.device, non_blocking=True))
