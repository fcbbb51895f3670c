"""Caches of one prompt, compressed in different ways, as the rows of one batch: decoded together, each as if alone."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from momentkv.hf.attention import tag
from momentkv.hf.cache import MomentCache
from momentkv.hf.layer import MomentLayer
from momentkv.layer import LayerState


class RowsLayer(CacheLayerMixin):
    """One layer of several caches. parts: moment layers, each with one or more rows of the batch, in order."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, parts: list[MomentLayer]) -> None:
        super().__init__()
        self.parts = parts
        self.is_initialized = True

    def _slices(self) -> list[slice]:
        ends = [0]
        for part in self.parts:
            assert part.state is not None
            ends.append(ends[-1] + part.state.keys.shape[0])
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the parts have seen a prompt already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Give each part its rows, and tag the keys with this layer."""
        for rows, part in zip(self._slices(), self.parts, strict=True):
            part.update(key_states[rows], value_states[rows])
        return tag(key_states, self), value_states

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kw: Any
    ) -> Tensor:
        """As `MomentLayer.attend`, part by part."""
        outs = []
        for rows, part in zip(self._slices(), self.parts, strict=True):
            mine: dict[str, Any] = {
                n: x[rows] if isinstance(x, Tensor) and x.shape[:1] == key.shape[:1] else x for n, x in kw.items()
            }
            mask = None if attention_mask is None else attention_mask.expand(key.shape[0], -1, -1, -1)[rows]
            outs.append(part.attend(module, query[rows], key[rows], value[rows], mask, **mine))
        return torch.cat(outs)

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.parts[0].get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As MomentLayer."""
        return self.parts[0].get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """-1: any number."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the given rows, which must be ascending."""
        kept = []
        for rows, part in zip(self._slices(), self.parts, strict=True):
            mine = indices[(indices >= rows.start) & (indices < rows.stop)] - rows.start
            if len(mine):
                if len(mine) < rows.stop - rows.start:
                    part.batch_select_indices(mine)
                kept.append(part)
        self.parts = kept


class RowsCache(Cache):
    """Several `MomentCache`s of one row each, after the same tokens, as one batch. The caches are used up.

    order: for each row of the batch, the index of the cache it came from; caches of equal settings lie together.
    """

    def __init__(self, caches: Sequence[MomentCache]) -> None:
        groups: dict[Any, list[int]] = {}
        for i, cache in enumerate(caches):
            groups.setdefault(cache.settings, []).append(i)
        self.order = [i for members in groups.values() for i in members]
        layers: list[Any] = []
        layer: Any
        for index, layer in enumerate(caches[0].layers):
            if isinstance(layer, MomentLayer):
                parts = [[caches[i].layers[index] for i in members] for members in groups.values()]
                layers.append(RowsLayer([_joined(part) for part in parts]))
            else:
                layer.batch_repeat_interleave(len(caches))
                layers.append(layer)
        super().__init__(layers=layers)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (ascending indices into the present batch)."""
        self.order = [self.order[i] for i in rows.tolist()]
        self.batch_select_indices(rows)


def _joined(layers: list[Any]) -> MomentLayer:
    first = layers[0]
    joined = MomentLayer(replace(first.plan, prompt_tokens=first.get_seq_length()), first.rank, first.index)
    joined.state = LayerState.stack([layer.state for layer in layers])
    joined._seen, joined.device, joined.is_initialized = first._seen, first.device, True
    return joined
