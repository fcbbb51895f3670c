"""Retained tokens in flat slots: one segment of `capacity` slots per (row, KV head), so that head budgets free memory.

Flat layout `[b, s, ...]`: head 0's slots first, then head 1's. Dense layout `[b, h, n, ...]`, `n` = the widest
segment. With equal capacities the two are the same memory. A slot is free where its position is -1.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

FREE = -1


def offsets(capacity: Int[Tensor, "b h"]) -> Int[Tensor, "b h"]:
    """First flat slot of each head."""
    return capacity.cumsum(-1) - capacity


def dense_index(capacity: Int[Tensor, "b h"], width: int) -> tuple[Int[Tensor, "b h n"], Bool[Tensor, "b h n"]]:
    """Flat slot of each dense slot, and which dense slots exist (heads narrower than `width` have no more)."""
    slot = torch.arange(width, device=capacity.device)
    exists = slot < capacity.unsqueeze(-1)
    return torch.where(exists, offsets(capacity).unsqueeze(-1) + slot, 0), exists


def flat_index(capacity: Int[Tensor, "b h"], slots: int, width: int) -> tuple[Int[Tensor, "b s"], Bool[Tensor, "b s"]]:
    """Dense slot (`head * width + slot`) of each flat slot, and which flat slots belong to a head at all."""
    ends = capacity.cumsum(-1).contiguous()
    flat = torch.arange(slots, device=capacity.device).expand(capacity.shape[0], -1).contiguous()
    head = torch.searchsorted(ends, flat, right=True)
    owned = head < capacity.shape[1]
    head = head.clamp(max=capacity.shape[1] - 1)
    slot = flat - offsets(capacity).gather(1, head)
    return torch.where(owned, head * width + slot, 0), owned


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gather along axis 1 of `[b, s]` or `[b, s, d]` by an index `[b, ...]`: the result is `[b, ..., (d)]`."""
    rows = torch.arange(x.shape[0], device=x.device).view(-1, *([1] * (index.dim() - 1)))
    return x[rows, index.long()]


def unpack(x: Tensor, capacity: Int[Tensor, "b h"], width: int) -> Tensor:
    """Flat to dense. A view (writes go through) when all capacities equal `width`, a gathered copy otherwise."""
    if x.shape[1] == capacity.shape[1] * width:
        return x.unflatten(1, (capacity.shape[1], width))
    index, exists = dense_index(capacity, width)
    out = take(x, index)
    empty = FREE if not x.is_floating_point() else 0
    return out.masked_fill(~exists.view(*exists.shape, *([1] * (out.dim() - 3))), empty)


def pack(x: Tensor, capacity: Int[Tensor, "b h"], slots: int) -> Tensor:
    """Dense to flat; flat slots of no head become free (-1) in integer tensors and 0 in floating ones."""
    index, owned = flat_index(capacity, slots, x.shape[2])
    out = take(x.flatten(1, 2), index)
    empty = FREE if not x.is_floating_point() else 0
    return out.masked_fill(~owned.view(*owned.shape, *([1] * (out.dim() - 2))), empty)
