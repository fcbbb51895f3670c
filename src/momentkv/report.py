"""What a cache really holds."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from momentkv.summary import FIELDS

if TYPE_CHECKING:
    from torch import Tensor

EXACT = ("keys", "values")


@dataclass(frozen=True)
class LayerReport:
    """One layer. tokens: held per row and KV head (one figure per row for layers that are left alone).

    exact, summary, auxiliary: bytes of K/V (free slots included), of the moments, and of positions, lengths and
    accumulated attention. compressed: False for layers that keep transformers' own cache.
    """

    layer: int
    compressed: bool
    tokens: list[list[int]]
    exact: int
    summary: int = 0
    auxiliary: int = 0

    @property
    def total(self) -> int:
        """All bytes of the layer."""
        return self.exact + self.summary + self.auxiliary


@dataclass(frozen=True)
class Report:
    """Tokens and bytes of a cache, measured on its tensors. seen: tokens it has seen, padding included."""

    method: str
    budget: str
    seen: int
    layers: list[LayerReport]

    @classmethod
    def of(cls, cache: Any) -> "Report":
        """Measure a MomentCache."""
        layers = [_measure(i, layer) for i, layer in enumerate(cache.layers)]
        return cls(cache.method, str(cache.budget), cache.get_seq_length(), layers)

    def _sum(self, name: str) -> int:
        return sum(getattr(layer, name) for layer in self.layers)

    @property
    def exact(self) -> int:
        """Bytes of exact keys and values."""
        return self._sum("exact")

    @property
    def summary(self) -> int:
        """Bytes of the moments."""
        return self._sum("summary")

    @property
    def auxiliary(self) -> int:
        """Bytes of everything else."""
        return self._sum("auxiliary")

    @property
    def total(self) -> int:
        """All bytes of the cache."""
        return self._sum("total")

    @property
    def tokens_per_head(self) -> float:
        """Mean number of exact tokens over compressed layers, rows and heads (over all layers of a full cache)."""
        chosen = [layer for layer in self.layers if layer.compressed] or self.layers
        counts = [n for layer in chosen for row in layer.tokens for n in row]
        return sum(counts) / max(1, len(counts))

    def __str__(self) -> str:
        lines = [
            f"{self.method}, budget {self.budget}: {self.seen} tokens seen, {self.tokens_per_head:.1f} held per head",
            f"{self.total:,} bytes = exact {self.exact:,} + summary {self.summary:,} + auxiliary {self.auxiliary:,}",
        ]
        for x in self.layers:
            note = "" if x.compressed else " (left as it is)"
            rows = " | ".join(" ".join(map(str, row)) for row in x.tokens)
            lines.append(f"layer {x.layer:>3}: {x.total:>12,} bytes, tokens {rows}{note}")
        return "\n".join(lines)


def nbytes(x: "Tensor") -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def _measure(index: int, layer: Any) -> LayerReport:
    state = getattr(layer, "state", None)
    if state is not None:
        sizes = {name: nbytes(x) for name, x in state.tensors().items()}
        exact, summary = (sum(sizes[n] for n in names if n in sizes) for names in (EXACT, FIELDS))
        return LayerReport(index, True, state.lengths().tolist(), exact, summary, sum(sizes.values()) - exact - summary)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.dim() != 4:
        return LayerReport(index, False, [], 0)
    return LayerReport(index, False, [[keys.shape[-2]]] * keys.shape[0], nbytes(keys) + nbytes(values))
