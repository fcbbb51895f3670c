"""The constant-size state of one layer: its declaration, its tensors and what attention reads from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from momentkv import store, summary
from momentkv.correction import estimate
from momentkv.moments import Moments
from momentkv.settings import Settings
from momentkv.state import AttnState, merge

Shape = tuple[int, ...]
_REQUIRED = ("keys", "values", "positions", "capacity", "budget", "seen")
_SLOTTED = ("keys", "values", "positions", "mass")


@dataclass
class LayerState:
    """Retained tokens and summary of the evicted ones, for one layer. Every tensor has the batch as first axis.

    keys, values: flat slots `[b, s, d]`, `[b, s, d_v]` (see `store`). positions: `[b, s]` int32, -1 for a free slot.
    capacity: slots of each head, `[b, h]` int32: its budget and one more, so that a token can be appended before
        another is evicted. budget: mean tokens per head that each row may hold, `[b]` int32. seen: tokens of each row
        so far, `[b]` int32. mass: accumulated attention, `[b, s]`, or None. summary: stored moments by name (see
        `summary`).
    width: slots of the widest head. uniform: whether all heads have that many. room: appends that are certain to need
        no eviction. These three live on the host.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    capacity: Tensor
    budget: Tensor
    seen: Tensor
    mass: Tensor | None = None
    summary: dict[str, Tensor] = field(default_factory=dict)
    width: int = 0
    uniform: bool = True
    room: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: the whole state but for what `refresh` restores."""
        own = {name: getattr(self, name) for name in (*_REQUIRED, "mass")}
        return {name: x for name, x in own.items() if x is not None} | self.summary

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "LayerState":
        """The inverse of `tensors`."""
        keys, values, positions, capacity, budget, seen = (tensors[name] for name in _REQUIRED)
        parts = {name: x for name, x in tensors.items() if name in summary.FIELDS}
        state = cls(keys, values, positions, capacity, budget, seen, tensors.get("mass"), parts)
        state.refresh()
        return state

    @classmethod
    def stack(cls, states: Sequence["LayerState"]) -> "LayerState":
        """The rows of several states as one. All must come from the same settings, but for the budget.

        Rows with fewer slots get slots that belong to no head.
        """
        slots = max(state.keys.shape[1] for state in states)

        def widen(name: str, x: Tensor) -> Tensor:
            if name not in _SLOTTED or x.shape[1] == slots:
                return x
            pad = [0, 0] * (x.dim() - 2) + [0, slots - x.shape[1]]
            return torch.nn.functional.pad(x, pad, value=store.empty_value(x))

        parts = [{name: widen(name, x) for name, x in state.tensors().items()} for state in states]
        return cls.from_tensors({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def map(self, f: Callable[[Tensor], Tensor]) -> "LayerState":
        """A new state with `f` applied to every tensor (move, reorder or repeat rows)."""
        return LayerState.from_tensors({name: f(x) for name, x in self.tensors().items()})

    def refresh(self) -> None:
        """Recompute what lives on the host; waits for the device."""
        self.width = int(self.capacity.max())
        self.uniform = bool((self.capacity == self.width).all())
        self.room = int((self.capacity - 1 - self.lengths()).amin())

    def slots(self) -> store.Slots:
        """The dense layout of this state."""
        return store.Slots(self.capacity, self.keys.shape[1], self.width, self.uniform)

    def dense(self, x: Tensor) -> Tensor:
        """A flat tensor per head: `[b, h, width, ...]`; a view when all heads have the same capacity."""
        return store.unpack(x, self.capacity, self.width)

    def lengths(self) -> Tensor:
        """Tokens held by each row and head, `[b, h]`."""
        return (self.dense(self.positions) != store.FREE).sum(-1)

    def moments(self, settings: Settings) -> Moments:
        """Moments of the evicted tokens; of the empty set when the settings keep none."""
        if not self.summary:
            heads = self.capacity.shape[1]
            return summary.no_moments(*(x[:, None, :0].expand(-1, heads, -1, -1) for x in (self.keys, self.values)))
        return summary.read(self.summary, settings)


def state_spec(
    settings: Settings, heads: int, d: int, dv: int, slots: int, dtype: torch.dtype
) -> dict[str, tuple[Shape, torch.dtype]]:
    """Declared shape (without batch) and dtype of every tensor of a `LayerState` with `slots` flat slots."""
    spec: dict[str, tuple[Shape, torch.dtype]] = {
        "keys": ((slots, d), dtype),
        "values": ((slots, dv), dtype),
        "positions": ((slots,), torch.int32),
        "capacity": ((heads,), torch.int32),
        "budget": ((), torch.int32),
        "seen": ((), torch.int32),
    }
    if settings.policy.needs_mass:
        spec["mass"] = ((slots,), torch.float32)
    return spec | summary.summary_spec(settings, heads, d, dv)


def spec_nbytes(spec: dict[str, tuple[Shape, torch.dtype]]) -> int:
    """Bytes of one row of a declared state."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in spec.values())


def with_correction(exact: AttnState, state: LayerState, settings: Settings, a: Tensor) -> AttnState:
    """The exact state of the retained tokens merged with the estimated state of the evicted ones (Eq. 10)."""
    if settings.correction == "off":
        return exact
    return merge(exact, estimate(a, state.moments(settings), settings.correction, settings.mass))


def protected_window(settings: Settings, tokens: Tensor, decoding: bool) -> int | Tensor:
    """How many of the newest tokens are never evicted; `tokens` is the mean budget of each row, `[b]`."""
    if settings.recent_share is not None:
        most = tokens - settings.sinks - settings.interval
        return (tokens * settings.recent_share).long().minimum(most).clamp(min=1)
    if decoding and settings.decode_window is not None:
        return settings.decode_window
    return settings.window
