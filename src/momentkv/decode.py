"""One decode step: append, evict if due, attend (Algorithm 1 of the paper)."""

from dataclasses import replace

import torch
from torch import Tensor

from momentkv import store, summary
from momentkv.layer import LayerState, protected_window, with_correction
from momentkv.policies.base import Evidence, attention_weights
from momentkv.selection import protected
from momentkv.settings import Settings
from momentkv.state import AttnState, attend

GROWTH = 64  # slots added per head when a cache that never evicts while decoding runs full


def _append(state: LayerState, k: Tensor, v: Tensor, real: Tensor) -> None:
    """Write one token per head into its first free slot, in place; rows that are not `real` keep the slot free."""
    positions = state.dense(state.positions)
    exists = torch.arange(state.width, device=k.device) < state.capacity.unsqueeze(-1)
    slot = ((positions == store.FREE) & exists).to(torch.uint8).argmax(-1)
    flat = (store.offsets(state.capacity) + slot).long()
    rows = torch.arange(flat.shape[0], device=flat.device).unsqueeze(-1)
    state.keys[rows, flat] = k.to(state.keys.dtype)
    state.values[rows, flat] = v.to(state.values.dtype)
    state.positions[rows, flat] = (
        torch.where(real, state.seen, store.FREE).unsqueeze(-1).expand_as(slot).to(torch.int32)
    )
    if state.mass is not None:
        state.mass[rows, flat] = 0.0
    state.seen += real


def _evict_one_interval(state: LayerState, e: Evidence, settings: Settings) -> None:
    """Evict `interval` tokens of every head that is over its budget, in place (Algorithm 1, lines 3-15)."""
    due = e.valid.sum(-1) >= state.capacity
    tokens = (state.capacity.sum(-1) - state.capacity.shape[1]) // state.capacity.shape[1]
    window = protected_window(settings, tokens, True)
    eligible = e.valid & ~protected(e.positions, e.valid, state.seen, settings.sinks, window)
    scores = settings.policy.score(e).masked_fill(~eligible, torch.inf)
    victim = scores.topk(min(settings.interval, scores.shape[-1]), dim=-1, largest=False).indices
    weight = due.unsqueeze(-1) & eligible.gather(-1, victim)
    if state.summary:
        k, v = (x.gather(2, victim.unsqueeze(-1).expand(*victim.shape, x.shape[-1])) for x in (e.keys, e.values))
        new = summary.absorb(state.summary, summary.moments_of(k, v, weight, settings), settings)
        for name, x in state.summary.items():
            x.copy_(new[name])
    flat = (store.offsets(state.capacity).unsqueeze(-1) + victim).flatten(1).long()
    kept = state.positions.gather(1, flat)
    state.positions.scatter_(1, flat, torch.where(weight.flatten(1), store.FREE, kept).to(torch.int32))


def _grow(state: LayerState) -> None:
    """Add `GROWTH` free slots to every head."""
    wide = state.capacity + GROWTH
    slots = state.keys.shape[1] + GROWTH * state.capacity.shape[1]

    def widen(x: Tensor) -> Tensor:
        empty = store.FREE if not x.is_floating_point() else 0
        pad = [0, 0] * (x.dim() - 2) + [0, GROWTH]
        return store.pack(torch.nn.functional.pad(state.dense(x), pad, value=empty), wide, slots)

    mass = widen(state.mass) if state.mass is not None else None
    keys, values, positions = widen(state.keys), widen(state.values), widen(state.positions)
    state.keys, state.values, state.positions, state.mass, state.capacity = keys, values, positions, mass, wide
    state.refresh()


def _add_mass(state: LayerState, e: Evidence) -> Evidence:
    """Add the current query's attention to the accumulated mass, in place."""
    assert state.mass is not None
    received = attention_weights(e.queries, e.query_positions, e.keys, e.positions, e.valid).sum(3).mean(2)
    mass = state.dense(state.mass) + received
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
    evicting = state.room <= 0
    _append(state, k, v, real)
    keys, values, positions = (state.dense(x) for x in (state.keys, state.values, state.positions))
    if evicting or state.mass is not None:
        e = Evidence(
            keys,
            values,
            positions,
            positions != store.FREE,
            a,
            (state.seen - 1).unsqueeze(-1),
            state.moments(settings),
            scaling,
            decoding=True,
            layer=layer,
            aligned=not settings.adaptive,
        )
        if state.mass is not None:
            e = _add_mass(state, e)
        if evicting:
            _evict_one_interval(state, e, settings)
            positions = state.dense(state.positions)
    if not evicting:
        state.room -= 1
    elif settings.interval > 1:
        state.refresh()
    exact = attend(a, keys, values, (positions != store.FREE)[:, :, None, None, :])
    return with_correction(exact, state, settings, a)
