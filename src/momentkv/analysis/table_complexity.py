"""Table 6: what one decode step of one KV head costs, counted, and what this implementation does."""

from collections.abc import Sequence

from momentkv.analysis import published
from momentkv.analysis.storage import Shape
from momentkv.analysis.table_layout import PaperTable, Value


def attend_operations(shape: Shape, tokens: int) -> int:
    """Multiply-adds of exact attention over `tokens` and the newest one, for the query heads of one KV head."""
    return shape.group * (tokens + 1) * (shape.d + shape.dv)


def residual_operations(shape: Shape, tokens: int) -> int:
    """Multiply-adds of the moment residuals (Eq. 11) of all candidates."""
    return (tokens + 1) * shape.d * shape.dv


def correct_operations(shape: Shape) -> int:
    """Multiply-adds of the estimated state (Eq. 8): value and mass, for every query head of the group."""
    return shape.group * (shape.d * shape.dv + shape.d)


def update_operations(shape: Shape) -> int:
    """Multiply-adds of absorbing one token: rank one into the scatter, and the means (Eq. 7)."""
    return shape.d * shape.dv + shape.d + shape.dv


STEPS = {
    "attend to what is retained": (
        "attend",
        "g (L+1) (d+dv)",
        attend_operations,
        "one product gives the logits of both scoring and attending; a 16-bit cache is copied to fp32 first, and "
        "unequal head budgets are gathered into a copy as wide as the widest head",
    ),
    "score for eviction, plain": (
        "evict, baselines",
        "g (L+1)",
        lambda shape, tokens: shape.group * (tokens + 1),
        "from the logits at hand; while decoding the window is the current query alone, so there is no factor w",
    ),
    "score for eviction, moment-informed": (
        "evict, MomentKV",
        "(L+1) d dv",
        residual_operations,
        "residual norms are not cached: once the cache is full, every step recomputes those of all candidates, of all "
        "heads, because each eviction changes the summary; with interval = k only every k-th step does",
    ),
    "update the summary": (
        "update",
        "d dv + d + dv",
        lambda shape, tokens: update_operations(shape),
        "one victim at a time is a rank-one update in fp32; the whole scatter is rewritten",
    ),
    "estimate what was evicted": (
        "correct",
        "g (d dv + d)",
        lambda shape, tokens: correct_operations(shape),
        "at every step, also those that evict nothing; the scatter is divided by n_e anew each time (d dv more)",
    ),
}


def complexity_table(model: str, shape: Shape, budgets: Sequence[int]) -> PaperTable:
    """Table 6, with a column of multiply-adds per budget, and of bytes in the lines of storage."""
    theirs = "published order"
    counted = {budget: f"L = {budget}" for budget in budgets}
    rows: list[dict[str, Value]] = []
    for step, (key, formula, operations, here) in STEPS.items():
        row: dict[str, Value] = {"step": step, theirs: published.COSTS[key], "multiply-adds": formula, "here": here}
        rows.append(row | {column: operations(shape, budget) for budget, column in counted.items()})
    stored = {
        "bytes beside K and V, plain": (
            "storage, baselines",
            "4 (L+1)",
            lambda budget: 4 * (budget + 1),
            "the position of every slot; H2O as much again for accumulated attention; no method goes without",
        ),
        "bytes beside K and V, MomentKV": (
            "storage, MomentKV",
            "4 (L+1) + 4 (d dv + d + dv + 1)",
            lambda budget: 4 * (budget + 1) + 4 * shape.numbers(),
            "the positions and an fp32 summary: O(L + d^2)",
        ),
    }
    for step, (key, formula, nbytes, here) in stored.items():
        row = {"step": step, theirs: published.COSTS[key], "multiply-adds": formula, "here": here}
        rows.append(row | {column: nbytes(budget) for budget, column in counted.items()})
    notes = (
        f"{model}: d = {shape.d}, dv = {shape.dv}, g = {shape.group} query heads per KV head; one of "
        f"{shape.all_heads:,} KV heads, so times this for a token; softmax, norms and masks are not counted",
        "in the lines of bytes, the columns of L are bytes and the formula is of bytes",
        "the orders of the paper are per attention head; its O(wL) is of a window of w queries, here 32 once after the "
        "prompt",
        f"moment-informed scoring costs {residual_operations(shape, 1) / attend_operations(shape, 1):.1f} times the "
        "attention itself at any L",
    )
    columns = ("step", theirs, "multiply-adds", *counted.values(), "here")
    return PaperTable(6, "Table 6: cost of one decode step, per KV head", columns, rows, notes)
