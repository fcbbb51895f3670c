"""Table 5: what the summary costs in bytes, in closed form, and held against what a real cache reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from momentkv.analysis import published
from momentkv.analysis.table_layout import Cell, PaperTable, Value
from momentkv.hf import models
from momentkv.hf.cache import MomentCache
from momentkv.hf.layer import MomentLayer
from momentkv.hf.prefill import WINDOW, Prefill
from momentkv.policies.base import Evidence
from momentkv.report import Report
from momentkv.summary import no_moments

MB = 10**6
STORED = {"16 bit, as in the paper": "raw-float16", "fp32, the default here": "centred"}


@dataclass(frozen=True)
class Shape:
    """What a cache's bytes depend on. layers: those that are compressed. heads: KV heads. group: query heads of one.

    d, dv: of a key and a value. dtype: of the cache. apart: layers that keep transformers' own cache.
    """

    layers: int
    heads: int
    group: int
    d: int
    dv: int
    dtype: torch.dtype
    apart: int = 0

    @property
    def pair(self) -> int:
        """Bytes of one exact token of one KV head: a token-equivalent."""
        return (self.d + self.dv) * self.dtype.itemsize

    @property
    def all_heads(self) -> int:
        """KV heads of all compressed layers."""
        return self.layers * self.heads

    def retained(self, budget: int) -> int:
        """Bytes of `budget` exact tokens of every head."""
        return self.all_heads * budget * self.pair

    def numbers(self, order: str = "first") -> int:
        """Numbers in the summary of one head: count, means and, in the first order, the `dv x d` scatter."""
        return (self.d * self.dv if order == "first" else 0) + self.d + self.dv + 1


LLAMA = Shape(**published.LLAMA_SHAPE, dv=published.LLAMA_SHAPE["d"], dtype=torch.bfloat16)


def shape_of(config: Any, dtype: str = "auto") -> Shape:
    """The shape of a model's cache. dtype: "auto" (default) is the checkpoint's."""
    if dtype not in models.DTYPES:
        raise models.ModelError(f"dtype {dtype!r}: expected one of {', '.join(models.DTYPES)}")
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    d = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = MomentCache(config, method="snapkv").layers
    compressed = sum(isinstance(layer, MomentLayer) for layer in layers)
    chosen = getattr(torch, str(text.dtype or "float32").removeprefix("torch.") if dtype == "auto" else dtype)
    group = text.num_attention_heads // heads
    return Shape(compressed, heads, group, d, d, chosen, len(layers) - compressed)


def made_up_cache(config: Any, shape: Shape, budget: int, **options: Any) -> MomentCache:
    """A real cache of `momentkv:paper`, filled to its budget from random keys and values instead of a model's."""
    tokens, draw = max(budget + 8, WINDOW), torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(1, shape.heads, *sizes, generator=draw).to(shape.dtype)

    keys, values = random(tokens, shape.d), random(tokens, shape.dv)
    positions = torch.arange(tokens).expand(1, shape.heads, -1)
    queries, seen = random(shape.group, WINDOW, shape.d), torch.arange(tokens - WINDOW, tokens).unsqueeze(0)
    valid, none = torch.ones_like(positions, dtype=torch.bool), no_moments(keys, values)
    evidence = Evidence(keys, values, positions, valid, queries, seen, none, shape.d**-0.5)
    blank, wanted = (MomentCache(config, method=m).layers for m in ("full", "snapkv"))
    layers = [evidence if isinstance(new, MomentLayer) else old for new, old in zip(wanted, blank, strict=True)]
    exact = Prefill(config, layers, torch.zeros(1, 1), tokens, torch.tensor([tokens]))
    return exact.compress(budget, "momentkv", "paper", **options)


class Bytes(NamedTuple):
    """Of a whole cache, as reports have them."""

    exact: int
    summary: int
    auxiliary: int


def declared(shape: Shape, budget: int, moments: str = "centred", order: str = "first") -> Bytes:
    """Closed form of what a report says: with the spare slot of every head, and a count that is always fp32."""
    width = 4 if moments == "centred" else 2
    slots = shape.heads * (budget + 1)
    own = (shape.numbers(order) - 1) * width + 4
    auxiliary = 4 * slots + 4 * shape.heads + 8  # positions, capacities, budget and tokens seen
    return Bytes(shape.layers * slots * shape.pair, shape.all_heads * own, shape.layers * auxiliary)


def reported(report: Report) -> Bytes:
    """What a real cache holds in its compressed layers."""
    mine = [layer for layer in report.layers if layer.compressed]
    exact, summary = sum(layer.exact for layer in mine), sum(layer.summary for layer in mine)
    return Bytes(exact, summary, sum(layer.auxiliary for layer in mine))


def _row(model: str, shape: Shape, budget: int, stored: str, width: int) -> dict[str, Value]:
    summary, retained = shape.all_heads * shape.numbers() * width, shape.retained(budget)
    return {
        "model": model,
        "L": budget,
        "summary": stored,
        "retained MB": Cell(retained / MB),
        "summary MB": Cell(summary / MB),
        "share %": Cell(100 * summary / retained, digits=1),
        "te": Cell(shape.numbers() * width / shape.pair, digits=1),
    }


def storage_table(model: str, config: Any, shape: Shape, budgets: Sequence[int]) -> tuple[PaperTable, int]:
    """Table 5, and 1 where a real cache's report is not what the closed form says, else 0."""
    rows, wrong = [], 0
    for budget in budgets:
        for stored, moments in STORED.items():
            found = reported(made_up_cache(config, shape, budget, moments=moments).report())
            agrees = found == declared(shape, budget, moments)
            wrong += not agrees
            row = _row(model, shape, budget, stored, 2 if moments != "centred" else 4)
            row |= {"report: exact": found.exact, "report: summary": found.summary, "report: other": found.auxiliary}
            rows.append(row | {"as declared": "yes" if agrees else f"NO: {tuple(declared(shape, budget, moments))}"})
    claims: dict[str, Value] = {"published MB": "4.1 and 8.5", "published share %": "6.4"}
    for budget in published.BUDGETS:
        for stored, width in zip(STORED, (2, 4), strict=True):
            row = _row(published.LLAMA, LLAMA, budget, stored, width)
            rows.append(row | (claims if (budget, width) == (128, 2) else {}))
    notes = (
        f"{model}: {shape.layers} compressed layers, {shape.heads} KV heads, d = {shape.d}, dv = {shape.dv}, "
        f"{str(shape.dtype).removeprefix('torch.')} cache; the summary has {shape.numbers():,} numbers per head; "
        f"MB = 10^6 bytes; {shape.apart} layers with a window or state of their own are not counted",
        "report: bytes of a real cache, filled with random tokens; its exact bytes have one spare slot per head, and a "
        "16-bit summary keeps its count in fp32 (2 bytes more per head than the paper's numbers)",
    )
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    return PaperTable(5, "Table 5: bytes of the summary", columns, rows, notes), int(wrong > 0)
