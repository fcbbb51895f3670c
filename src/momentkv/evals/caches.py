"""The caches of a sample: every variant from one prefill, and what each of them holds."""

from dataclasses import dataclass
from typing import Any

from momentkv.evals.variants import Variant
from momentkv.hf.cache import MomentCache
from momentkv.hf.prefill import Prefill
from momentkv.report import Report, nbytes

# Never evicts: the full cache, in a form that can be a row beside compressed ones.
_KEEP: dict[str, Any] = {"method": "streaming", "sinks": 0, "decoding": "grow"}


@dataclass(frozen=True)
class Held:
    """What a variant holds after the prompt. budget: as given to the cache. All sizes in bytes.

    token_equivalents: `bytes` in units of one exact token of every head. peak: the most that was alive at once while
    the prompt was read: the layers compressed so far and one layer's full keys and values.
    """

    budget: str
    tokens_per_head: float
    bytes: int
    summary_bytes: int
    token_equivalents: float
    peak_bytes: int


def _full_bytes(exact: Prefill) -> list[int]:
    """Of the full cache, per layer. Recorded evidence and transformers' layers both have `keys` and `values`."""
    pairs = [(getattr(x, "keys", None), getattr(x, "values", None)) for x in exact.layers]
    return [nbytes(k) + nbytes(v) if k is not None and v is not None else 0 for k, v in pairs]


def _held(report: Report, budget: str, full: list[int], tokens: int) -> Held:
    sizes = [layer.total for layer in report.layers]
    per_token = sum(n for layer, n in zip(report.layers, full, strict=True) if layer.compressed) / tokens
    compressed = sum(layer.total for layer in report.layers if layer.compressed)
    peak = max(sum(sizes[: i + 1]) + full[i] for i in range(len(sizes)))
    return Held(
        budget,
        round(report.tokens_per_head, 3),
        report.total,
        report.summary,
        round(compressed / per_token, 3) if per_token else 0.0,
        max(peak, report.total),
    )


def compress_all(exact: Prefill, variants: list[Variant], follow: int) -> tuple[list[MomentCache], list[Held]]:
    """A cache for every variant, each as a live prefill would have left it.

    Args:
        exact: an unpadded prefill of one row. follow: tokens that will come after it at most (room for the full cache).
    """
    full = _full_bytes(exact)
    caches: list[MomentCache] = []
    held: list[Held] = []
    totals: dict[Variant, int] = {}
    for variant in variants:
        if variant.settings is None:
            caches.append(exact.compress(exact.tokens + follow, **_KEEP))
            total, tokens = sum(full), exact.tokens
            held.append(Held("full", float(tokens), total, 0, float(tokens), total))
            continue
        if variant.matched is not None and variant.matched not in totals:
            totals[variant.matched] = _cache(exact, variant.matched, str(variant.matched.budget)).report().total
        budget = variant.budget if variant.matched is None else f"{totals[variant.matched]}B"
        cache = _cache(exact, variant, str(budget))
        caches.append(cache)
        report = cache.report()
        totals[variant] = report.total
        held.append(_held(report, str(budget), full, exact.tokens))
    return caches, held


def _cache(exact: Prefill, variant: Variant, budget: str) -> MomentCache:
    method = variant.method.partition("+")[0]
    return exact.compress(budget, method, variant.preset, prompt_tokens=exact.tokens, **variant.options)
