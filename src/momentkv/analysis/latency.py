"""Table 4: order of the approximation, its score, its bytes, and milliseconds per token on this machine."""

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentkv.analysis import published
from momentkv.analysis.storage import MB, Shape, declared, shape_of
from momentkv.analysis.table_layout import Cell, PaperTable, Value
from momentkv.analysis.table_runs import ORDERED, Run
from momentkv.analysis.table_scores import counts
from momentkv.evals.variants import FULL, Variant, variants_of
from momentkv.hf import models
from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.compat import cache_argument
from momentkv.hf.prefill import prefill
from momentkv.hf.prompt import encode, read_text

WARM_UP, ROUNDS, STEPS = 4, 6, 8  # decode steps that are not timed; then rounds over all methods, steps in each
QUARTILES = (0.25, 0.5, 0.75)
SHORT = 24  # tokens of the prompt of the gate: every budget holds them, so that every method must say the same
ORDERS = {  # by method: order of the correction, the paper's line, whether the residual scores
    ORDERED[0]: ("none", "none", "SnapKV"),
    ORDERED[1]: ("zeroth", "zeroth", "SnapKV"),
    ORDERED[2]: ("first", None, "SnapKV"),
    ORDERED[3]: ("first", "first", "moment-informed"),
    FULL: ("full", "full", "-"),
}


@dataclass(frozen=True)
class Timing:
    """Milliseconds per token of one method: median and quartiles. failure: why there are none, or ""."""

    median: float | None = None
    low: float | None = None
    high: float | None = None
    steps: int = 0
    failure: str = ""


def _step(model: Any, cache: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache_argument(cache)).logits[:, -1]
    if logits.is_cuda:
        torch.cuda.synchronize()  # so that the clock sees the work
    return logits


def _cache(variant: Variant, compress: Any) -> MomentCache:
    base = variant.method.partition("+")[0]
    return compress(variant.budget or 1, base, variant.preset, **variant.options)


@torch.no_grad()
def gate(model: Any, variant: Variant, ids: list[int]) -> str:
    """Why a method may not be timed, or "": nothing is evicted yet, so its first tokens must be the model's own.

    Args:
        ids: a short prompt. A token counts as the same where its logit ties with the largest, up to rounding.
    """
    cache = _cache(variant, lambda *a, **kw: MomentCache(model.config, *a, **kw))
    history = given = torch.tensor([ids], device=model.device)
    for turn in range(2):
        logits = model(input_ids=history, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        with attend(model):
            own = _step(model, cache, given)[0].float()
        slack = max(1e-3, 4 * torch.finfo(model.dtype).eps * float(logits.abs().max()))
        if not bool(torch.isfinite(own).all()):
            return "logits are not finite"
        if float(logits.max() - logits[own.argmax()]) > slack:
            return f"token {turn + 1} is not the model's own"
        given = logits.argmax().view(1, 1)
        history = torch.cat([history, given], dim=1)
    return ""


@torch.no_grad()
def measure(model: Any, variants: Sequence[Variant], ids: list[int]) -> dict[str, Timing]:
    """Greedy decoding after one exact prefill of `ids`, the methods in turns; by method.

    The order of the turns changes from round to round, so that no method always follows the same one.
    """
    failures = {v.method: gate(model, v, ids[:SHORT]) for v in variants}
    exact = prefill(model, torch.tensor([ids], device=model.device))
    caches = {v.method: _cache(v, exact.compress) for v in variants if not failures[v.method]}
    tokens = dict.fromkeys(caches, exact.logits.argmax(-1, keepdim=True))
    del exact
    seconds: dict[str, list[float]] = {method: [] for method in caches}
    methods = list(caches)
    with attend(model):
        for turn in range(ROUNDS + 1):
            first = turn % max(1, len(methods))
            for method in methods[first:] + methods[:first]:
                for _ in range(STEPS if turn else WARM_UP):
                    start = time.perf_counter()
                    logits = _step(model, caches[method], tokens[method])
                    spent = time.perf_counter() - start
                    if not bool(torch.isfinite(logits).all()):
                        failures[method] = "logits are not finite"
                    tokens[method] = logits.argmax(-1, keepdim=True)
                    seconds[method] += [spent] if turn else []
    return {m: Timing(failure=f) if f else _timing(seconds[m]) for m, f in failures.items()}


def _timing(seconds: list[float]) -> Timing:
    quartiles = torch.quantile(1e3 * torch.tensor(seconds), torch.tensor(QUARTILES))
    low, median, high = quartiles.tolist()
    return Timing(median, low, high, len(seconds))


def prompt_ids(tokenizer: Any, texts: Sequence[str], length: int) -> list[int]:
    """`length` tokens of the texts, fewer if they have no more; without texts, of Python's language reference."""
    from pydoc_data.topics import topics

    text = "\n\n".join(map(read_text, texts)) or "\n\n".join(topics[name] for name in sorted(topics))
    return encode(tokenizer, text[: 16 * length])[:length]


def order_table(args: Namespace, run: Run, budget: int, heading: str) -> PaperTable:
    """Table 4: scores from the run, speed and bytes measured here."""
    model, tokenizer = models.load(
        args.model, device=args.device, dtype=args.dtype, offline=args.offline, trust_remote_code=args.trust_remote_code
    )
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or args.length
    length = min(args.length, most - WARM_UP - ROUNDS * STEPS - 1)
    variants = [v for v in variants_of(ORDERED, [str(budget)]) if v.method in ORDERS and v.match == "tokens"]
    ids = prompt_ids(tokenizer, args.texts, length)
    timings = measure(model, variants, ids)
    dtype = str(model.dtype).removeprefix("torch.")
    rows: list[dict[str, Value]] = [counts(run, {"score": run.score}) | {"order": "samples", "method": None}]
    for method in ORDERS:
        score = run.cell(run.score, run.entry(method, budget))
        rows.append(_row(method, timings[method], score, shape_of(model.config, dtype), budget, heading))
    for entry in [e for e in run.entries(budget) if e.match == "bytes"]:
        name = f"{entry.name}, bytes of {entry.matched}"
        rows.append({"order": "none", "selection": "-", "method": name, "score": run.cell(run.score, entry)})
    notes = (
        f"ms/token: median and quartiles of {ROUNDS * STEPS} greedy steps after {len(ids):,} tokens, methods in turns "
        f"({model.device.type}, {dtype}, {torch.get_num_threads()} threads); figures whose quartiles overlap rank "
        "nothing; the length of the paper's prompts is not known",
        "before timing, every method must give the model's own first tokens on a prompt that it need not evict from",
        "summary MB: closed form, fp32, whole model; the moment score needs the summary as well",
        *(f"no speed of {method}: {timing.failure}" for method, timing in timings.items() if timing.failure),
    )
    columns = ("order", "selection", "method", "score", "ms/token", "summary MB", f"{heading} score", f"{heading} ms")
    title = f"Table 4: order of the approximation, L = {budget}"
    return PaperTable(4, title, columns, rows, notes, ("score", "ms/token"))


def _row(method: str, timing: Timing, score: Cell, shape: Shape, budget: int, heading: str) -> dict[str, Value]:
    order, line, selection = ORDERS[method]
    summary = 0 if order in ("none", "full") else declared(shape, budget, order=order).summary
    theirs, ms = published.ORDERS[line] if line else (published.ablation(2, published.ORDERS_BUDGET), None)
    same = budget == published.ORDERS_BUDGET or order == "full"  # the full cache has no budget
    return {
        "order": order,
        "selection": selection,
        "method": method,
        "score": score,
        "ms/token": Cell(timing.median, timing.low, timing.high, timing.steps or None, digits=1),
        "summary MB": Cell(summary / MB, digits=3),
        f"{heading} score": theirs if same else None,
        f"{heading} ms": ms if same else None,
    }
