"""From a prompt, or a chunk of one, to the state of a layer: score, budget, keep, summarise the rest."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from momentkv import budgets, store, summary
from momentkv.layer import LayerState, protected_window, state_spec
from momentkv.policies.base import Evidence, received_attention
from momentkv.selection import block_means, keep_mask, protected
from momentkv.settings import Settings


class Chunk(NamedTuple):
    """New tokens of one layer, real ones first in each row.

    keys, values: `[b, h, m, d]`, `[b, h, m, d_v]`. positions: `[b, m]`, -1 where there is no token.
    queries: scaled, in the order the model gave them, `[b, h, g, m, d]`. query_positions: `[b, m]`, -1 for padding.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor
    query_positions: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, queries: Tensor, seen: Tensor, valid: Tensor | None) -> "Chunk":
        """Drop padding.

        Args:
            seen: tokens of each row before these, `[b]`.
            valid: `[b, m]`, False for padding anywhere in a row; None when there is none.
        """
        count = keys.shape[2]
        if valid is None:
            positions = seen.unsqueeze(-1) + torch.arange(count, device=keys.device)
            return cls(keys, values, positions, queries, positions)
        query_positions = torch.where(valid, seen.unsqueeze(-1) + valid.cumsum(-1) - 1, store.FREE)
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
        keys, values = (x.gather(2, order[:, None, :, None].expand_as(x)) for x in (keys, values))
        return cls(keys, values, query_positions.gather(1, order), queries, query_positions)

    def window(self, size: int) -> tuple[Tensor, Tensor]:
        """The last `size` real queries of each row and their positions, -1 where a row has fewer."""
        order = self.query_positions.argsort(dim=-1, stable=True)[:, -size:]
        index = order[:, None, None, :, None].expand(*self.queries.shape[:3], -1, self.queries.shape[-1])
        return self.queries.gather(3, index), self.query_positions.gather(1, order)

    @property
    def real(self) -> Tensor:
        """Number of real tokens of each row, `[b]`."""
        return (self.positions != store.FREE).sum(-1)


def candidates(
    chunk: Chunk,
    settings: Settings,
    scaling: float,
    old: LayerState | None = None,
    layer: int = 0,
    window: int | None = None,
) -> Evidence:
    """What may be kept after a chunk: the tokens `old` retains and the new ones, in order of position.

    Args:
        window: observation queries to carry, default `settings.window`.
    """
    heads = chunk.keys.shape[1]
    keys, values = chunk.keys, chunk.values
    positions = chunk.positions.unsqueeze(1).expand(-1, heads, -1)
    mass = torch.zeros(positions.shape, dtype=torch.float32, device=keys.device)
    if old is not None:
        keys = torch.cat([old.dense(old.keys), keys], dim=2)
        values = torch.cat([old.dense(old.values), values], dim=2)
        positions = torch.cat([old.dense(old.positions), positions], dim=2)
        mass = torch.cat([old.dense(old.mass), mass], dim=2) if old.mass is not None else mass
        behind = positions.masked_fill(positions == store.FREE, torch.iinfo(positions.dtype).max)
        order = behind.argsort(dim=-1, stable=True)
        positions, mass = positions.gather(2, order), mass.gather(2, order) if old.mass is not None else mass
        keys, values = (x.gather(2, order.unsqueeze(-1).expand_as(x)) for x in (keys, values))
    valid = positions != store.FREE
    if settings.policy.needs_mass:
        mass = mass + received_attention(chunk.queries, chunk.query_positions, keys, positions, valid)
    queries, query_positions = chunk.window(window or settings.window)
    return Evidence(
        keys,
        values,
        positions,
        valid,
        queries,
        query_positions,
        summary.no_moments(keys, values),
        scaling,
        mass if settings.policy.needs_mass else None,
        layer=layer,
    )


def _evict_in_rounds(
    e: Evidence, settings: Settings, tokens: Tensor, capacity: Tensor, seen: Tensor, stored: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Keep-mask, capacities and stored summary after eviction; rows that fit into their capacity keep everything."""
    heads = e.valid.shape[1]
    over = (e.valid.sum(-1) >= capacity).any(-1)  # one slot of the capacity stays free
    total, target = e.valid.sum((1, 2)), heads * tokens
    shield = protected(e.positions, e.valid, seen, settings.sinks, protected_window(settings, tokens, False))
    rounds = settings.rounds if settings.score == "moment" else 1
    keep, everything = e.valid, torch.iinfo(torch.int64).max
    for i in range(1, rounds + 1):
        moments = summary.read(stored, settings) if stored else e.moments
        scores = settings.policy.score(replace(e, moments=moments))
        left = total - (total - target).clamp(min=0) * i // rounds
        if settings.adaptive:
            eligible = keep & ~shield
            judged = block_means(scores, eligible, settings.block)
            budget = budgets.adaptive(judged, eligible, (shield & keep).sum(-1), left, settings)
            budget = budget + budgets.even_shares((target - left).clamp(min=0), heads)  # room that nobody needs yet
        else:
            budget = (left // heads).unsqueeze(-1).expand(-1, heads)
        kept = keep_mask(scores, keep, shield, budget.masked_fill(~over.unsqueeze(-1), everything), settings.block)
        if stored:
            evicted = summary.moments_of(e.keys, e.values, keep & ~kept, settings)
            stored = summary.absorb(stored, evicted, settings)
        keep = kept
    capacity = torch.where(over.unsqueeze(-1), budget + 1, capacity)
    return keep, capacity.to(torch.int32), stored


@torch.inference_mode(False)  # a state born in inference mode could not be updated outside it
@torch.no_grad()
def compress(
    e: Evidence, settings: Settings, tokens: Tensor, seen: Tensor, old: LayerState | None = None
) -> LayerState:
    """Evict down to the budget: the state of the candidates `e` (docs/math.md, section 5).

    Args:
        e: candidates in order of position: a prompt, or what `old` retains together with a new chunk. Its queries
            are the observation window; more than `settings.window` of them are cut to the last.
        tokens: mean budget per head of each row, `[b]`.
        seen: tokens of each row so far, `[b]`.
        old: the state before the chunk, which this one replaces; its summary is carried on.

    Returns:
        A new state with `h * (tokens.max() + 1)` slots; rows that fit keep everything.
    """
    batch, heads, _, d = e.keys.shape
    e = replace(
        e,
        queries=e.queries[..., -settings.window :, :],
        query_positions=e.query_positions[:, -settings.window :],
        aligned=not settings.adaptive,
    )
    spec = state_spec(settings, heads, d, e.values.shape[-1], heads * (int(tokens.max()) + 1), e.keys.dtype)
    names = summary.summary_spec(settings, heads, d, e.values.shape[-1])
    stored = (
        old.summary
        if old
        else {n: torch.zeros((batch, *shape), dtype=dtype, device=e.keys.device) for n, (shape, dtype) in names.items()}
    )
    kept_capacity = old is not None and settings.decoding == "evict"  # one that has grown starts from the budget again
    capacity = old.capacity if old and kept_capacity else (tokens + 1).unsqueeze(-1).expand(-1, heads).to(torch.int32)
    keep, capacity, stored = _evict_in_rounds(e, settings, tokens, capacity, seen, stored)
    width = int(capacity.max())
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    order = torch.nn.functional.pad(order, (0, width - order.shape[-1]))
    held = torch.arange(width, device=keep.device) < keep.sum(-1, keepdim=True)

    def flat(x: Tensor, name: str) -> Tensor:
        index = order if x.dim() == 3 else order.unsqueeze(-1).expand(*order.shape, x.shape[-1])
        dense = x.gather(2, index).masked_fill(~(held if x.dim() == 3 else held.unsqueeze(-1)), store.empty_value(x))
        return store.pack(dense.to(spec[name][1]), capacity, spec[name][0][0])

    state = LayerState(
        flat(e.keys, "keys"),
        flat(e.values, "values"),
        flat(e.positions, "positions"),
        capacity,
        tokens.to(torch.int32),
        seen.to(torch.int32),
        flat(e.mass, "mass") if e.mass is not None and "mass" in spec else None,
        stored,
    )
    state.refresh()
    return state
