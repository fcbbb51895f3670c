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


def empty_value(x: Tensor) -> int:
    """What an empty slot holds: -1 in positions and other integers, 0 in floating tensors."""
    return 0 if x.is_floating_point() else FREE


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


class Slots:
    """The dense layout of one state: built once, used for all of its tensors.

    Args:
        capacity: slots of each head, `[b, h]`. slots: flat slots per row. width: of the widest head.
        uniform: whether every capacity equals `width`: flat and dense are then the same memory, unless a longer row
            that is gone has left slots behind.
    """

    def __init__(self, capacity: Int[Tensor, "b h"], slots: int, width: int, uniform: bool) -> None:
        batch, heads = capacity.shape
        self.shape, self.uniform = (batch, heads, width), uniform and slots == heads * width
        first = torch.arange(0, batch * slots, slots, device=capacity.device).unsqueeze(-1)
        self.base = first + offsets(capacity)  # first slot of each head, counted over all rows
        if not self.uniform:
            slot = torch.arange(width, device=capacity.device)
            self.exists = slot < capacity.unsqueeze(-1)
            self.index = torch.where(self.exists, self.base.unsqueeze(-1) + slot, 0).flatten()

    def dense(self, x: Tensor) -> Tensor:
        """Flat to dense: a view where uniform; else a copy, where slots that do not exist hold another slot's data."""
        if self.uniform:
            return x.unflatten(1, self.shape[1:])
        return x.flatten(0, 1).index_select(0, self.index).unflatten(0, self.shape)

    def positions(self, x: Int[Tensor, "b s"]) -> Int[Tensor, "b h n"]:
        """Dense positions, -1 where there is no token or no slot."""
        return self.dense(x) if self.uniform else self.dense(x).masked_fill(~self.exists, FREE)

    def write(self, x: Tensor, slot: Int[Tensor, "b h m"], new: Tensor) -> None:
        """Write `new` `[b, h, m, ...]` to dense slots of a flat tensor, in place."""
        index = (self.base.unsqueeze(-1) + slot).flatten()
        x.view(-1, *x.shape[2:]).index_copy_(0, index, new.to(x.dtype).flatten(0, 2))  # `view`: never into a copy


def unpack(x: Tensor, capacity: Int[Tensor, "b h"], width: int) -> Tensor:
    """Flat to dense. A view (writes go through) when all capacities equal `width`, a gathered copy otherwise.

    Slots that a head does not have are free (-1) in integer tensors and 0 in floating ones.
    """
    slots = Slots(capacity, x.shape[1], width, bool((capacity == width).all()))
    out = slots.dense(x)
    if slots.uniform:
        return out
    return out.masked_fill(~slots.exists.view(*slots.shape, *([1] * (out.dim() - 3))), empty_value(x))


def pack(x: Tensor, capacity: Int[Tensor, "b h"], slots: int) -> Tensor:
    """Dense to flat; flat slots of no head become free (-1) in integer tensors and 0 in floating ones."""
    index, owned = flat_index(capacity, slots, x.shape[2])
    out = take(x.flatten(1, 2), index)
    return out.masked_fill(~owned.view(*owned.shape, *([1] * (out.dim() - 2))), empty_value(x))
