"""One decode step: append, evict if due, attend (Algorithm 1 of the paper)."""

from dataclasses import replace

import torch
from torch import Tensor

from momentkv import store, summary
from momentkv.layer import LayerState, protected_window, with_correction
from momentkv.moments import Moments
from momentkv.policies.base import Evidence, window_attention
from momentkv.selection import protected
from momentkv.settings import Settings
from momentkv.state import AttnState, accumulate_dtype, attend_logits, per_head_product

GROWTH = 64  # slots added per head when a cache that never evicts while decoding runs full


def _place(state: LayerState, slots: store.Slots, positions: Tensor, slot: Tensor, new: Tensor) -> None:
    """Write positions, both to the state and to their dense copy, in place."""
    slots.write(state.positions, slot, new)
    if not slots.uniform:
        positions.scatter_(-1, slot, new)


def _append(state: LayerState, slots: store.Slots, positions: Tensor, k: Tensor, v: Tensor, real: Tensor) -> None:
    """Write one token per head into its first free slot, in place; rows that are not `real` keep the slot free."""
    free = positions == store.FREE
    if not slots.uniform:
        free &= slots.exists
    slot = free.to(torch.uint8).argmax(-1, keepdim=True)
    slots.write(state.keys, slot, k.unsqueeze(2))
    slots.write(state.values, slot, v.unsqueeze(2))
    position = torch.where(real, state.seen, store.FREE).view(-1, 1, 1)
    _place(state, slots, positions, slot, position.expand_as(slot))
    if state.mass is not None:
        slots.write(state.mass, slot, torch.zeros_like(slot))
    state.seen += real


def _summarise(state: LayerState, e: Evidence, victim: Tensor, weight: Tensor, settings: Settings) -> None:
    """Absorb the victims into the stored summary, in place."""
    k, v = (x.gather(2, victim.unsqueeze(-1).expand(*victim.shape, x.shape[-1])) for x in (e.keys, e.values))
    if victim.shape[-1] == 1:
        evicted = Moments.single(k.squeeze(2), v.squeeze(2), weight.squeeze(-1))
    else:
        evicted = summary.moments_of(k, v, weight, settings)
    new = summary.absorb(state.summary, evicted, settings)
    for name, x in state.summary.items():
        x.copy_(new[name])


def _evict(state: LayerState, slots: store.Slots, e: Evidence, settings: Settings) -> None:
    """Evict `interval` tokens of every head that is over its budget, in place (Algorithm 1, lines 3-15)."""
    due = e.valid.sum(-1, keepdim=True) >= state.capacity.unsqueeze(-1)
    window = protected_window(settings, state.budget, True)
    eligible = e.valid & ~protected(e.positions, e.valid, state.seen, settings.sinks, window)
    scores = settings.policy.score(e)
    scores = scores.clamp(max=torch.finfo(scores.dtype).max).masked_fill(~eligible, torch.inf)
    if settings.interval == 1:
        victim = scores.argmin(-1, keepdim=True)
    else:
        victim = scores.topk(min(settings.interval, scores.shape[-1]), dim=-1, largest=False).indices
    weight = due & eligible.gather(-1, victim)
    if state.summary:
        _summarise(state, e, victim, weight, settings)
    _place(state, slots, e.positions, victim, e.positions.gather(-1, victim).masked_fill(weight, store.FREE))


def _grow(state: LayerState) -> None:
    """Add `GROWTH` free slots to every head."""
    wide = state.capacity + GROWTH
    slots = state.keys.shape[1] + GROWTH * state.capacity.shape[1]

    def widen(x: Tensor) -> Tensor:
        pad = [0, 0] * (x.dim() - 2) + [0, GROWTH]
        return store.pack(torch.nn.functional.pad(state.dense(x), pad, value=store.empty_value(x)), wide, slots)

    mass = widen(state.mass) if state.mass is not None else None
    keys, values, positions = widen(state.keys), widen(state.values), widen(state.positions)
    state.keys, state.values, state.positions, state.mass, state.capacity = keys, values, positions, mass, wide
    state.refresh()


def _add_mass(state: LayerState, slots: store.Slots, e: Evidence, real: Tensor) -> Evidence:
    """Add the current query's attention to the accumulated mass, in place; padding is no query."""
    assert state.mass is not None
    mass = slots.dense(state.mass) + window_attention(e) * real.view(-1, 1, 1)
    state.mass.copy_(store.pack(mass, state.capacity, state.mass.shape[1]))
    return replace(e, mass=mass)


@torch.no_grad()
def decode(
    state: LayerState, settings: Settings, a: Tensor, k: Tensor, v: Tensor, real: Tensor, scaling: float, layer: int = 0
) -> AttnState:
    """One decode step: append, evict if due, attend (Algorithm 1). The state is updated in place.

    Args:
        a: scaled queries `[b, h, g, 1, d]`. k, v: the new token, `[b, h, d]`, `[b, h, d_v]`.
        real: `[b]`, False for rows whose token is padding. scaling: the model's softmax scale. layer: its index.
    """
    if state.room <= 0 and settings.decoding == "grow":
        _grow(state)
    evicting, slots = state.room <= 0, state.slots()
    positions = slots.positions(state.positions)
    _append(state, slots, positions, k, v, real)
    dtype = accumulate_dtype(a)
    keys, values = slots.dense(state.keys), slots.dense(state.values)
    live = positions != store.FREE
    logits = per_head_product(a.to(dtype), keys.to(dtype).transpose(-1, -2))
    logits = logits.masked_fill(~live[:, :, None, None], -torch.inf)
    if evicting or state.mass is not None:
        newest = (state.seen - 1).unsqueeze(-1)
        moments, aligned = state.moments(settings), not settings.adaptive
        e = Evidence(keys, values, positions, live, a, newest, moments, scaling, None, logits, True, layer, aligned)
        if state.mass is not None:
            e = _add_mass(state, slots, e, real)
        if evicting:
            _evict(state, slots, e, settings)
            logits = logits.masked_fill((positions == store.FREE)[:, :, None, None], -torch.inf)
    if not evicting:
        state.room -= 1
    elif settings.interval > 1:
        state.refresh()
    return with_correction(attend_logits(logits, values.to(dtype)), state, settings, a)
