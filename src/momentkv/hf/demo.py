"""The demo: one long text, one exact prefill, and what every method makes of it at the same budget."""

import platform
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import momentkv
from momentkv.budgets import Budget
from momentkv.hf import demo_table, models
from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.compat import cache_argument
from momentkv.hf.generate import check_method
from momentkv.hf.prefill import Prefill, prefill
from momentkv.hf.progress import LayerProgress
from momentkv.hf.prompt import Turn, encode, note, read_text
from momentkv.report import Report

METHODS = {"StreamingLLM": "streaming", "SnapKV": "snapkv", "Ada-KV": "adakv", "MomentKV": "momentkv"}
NUMBER = "7294816"
# A question that the demo model answers from the full cache: one that it cannot answer at all would compare nothing.
NEEDLE = f"The telephone number of the Lisbon office is {NUMBER}."
QUESTION = "What is the telephone number of the Lisbon office?"
CONTINUATION = 128  # tokens of the text after the document, on which the methods are compared with the full cache
ANSWER = 24  # tokens
LEAST = 600  # tokens of document below which there is nothing to compress
WARM_UP = 8  # decode steps that are not timed


@dataclass(frozen=True)
class Text:
    """Token ids. prompt: the template's start and the document; then its continuation, or the question instead."""

    prompt: list[int]
    document_tokens: int
    needle_depth: float
    continuation: list[int]
    question: list[int]

    @classmethod
    def of(cls, tokenizer: Any, text: str, tokens: int) -> "Text":
        """Put the needle at a paragraph's (or sentence's) border halfway through `tokens` tokens of `text`."""
        turn = Turn.of(tokenizer) if tokenizer.chat_template else Turn(join="\n\n")
        ids = encode(tokenizer, text[: 16 * (tokens + CONTINUATION)])[: tokens + CONTINUATION]
        middle = len(tokenizer.decode(ids[: max(0, min(tokens, len(ids) - CONTINUATION)) // 2]))
        borders = [text.rfind(border, 0, middle) + len(border) for border in ("\n\n", ". ") if border in text[:middle]]
        cut = max(borders, default=middle)
        before = encode(tokenizer, text[:cut].rstrip() + "\n\n")
        ids = before + encode(tokenizer, NEEDLE + "\n\n" + text[cut : 16 * (tokens + CONTINUATION)].lstrip("\n"))
        length = min(tokens, len(ids) - CONTINUATION)
        if length < LEAST:
            raise ValueError(
                f"the document has {max(0, length)} tokens and {CONTINUATION} to continue with: at least {LEAST} + "
                f"{CONTINUATION} are needed (--document, --tokens)"
            )
        start = encode(tokenizer, turn.before, special=False) or encode(tokenizer, " ", special=True)[:-1]
        question = encode(tokenizer, turn.join + QUESTION + (turn.after or "\nAnswer:"))
        return cls(start + ids[:length], length, len(before) / length, ids[length : length + CONTINUATION], question)


@dataclass(frozen=True)
class Row:
    """What was measured for one cache. report: taken right after the prompt."""

    name: str
    method: str
    budget: str
    report: Report
    log_probs: Tensor  # [tokens, vocabulary], on the CPU
    answer: str
    ms_per_token: float


def _forward(model: Any, cache: MomentCache, ids: list[int]) -> Tensor:
    """Logits after the last of `ids`, `[1, vocabulary]`."""
    given = torch.tensor([ids], device=model.device)
    logits = model(input_ids=given, use_cache=True, logits_to_keep=1, **cache_argument(cache)).logits[:, -1]
    if logits.is_cuda:
        torch.cuda.synchronize()  # so that the clock sees the work
    return logits


def _follow(model: Any, cache: MomentCache, first: Tensor, ids: list[int], step: Callable[[], None]) -> Any:
    """Log-probabilities before each of `ids`, which are fed one by one, and the median milliseconds per step."""
    rows, seconds = [first], []
    for token in ids[:-1]:
        start = time.perf_counter()
        rows.append(_forward(model, cache, [token]))
        seconds.append(time.perf_counter() - start)
        step()
    return torch.cat(rows).float().log_softmax(-1).cpu(), 1e3 * statistics.median(seconds[WARM_UP:])


def _answer(model: Any, tokenizer: Any, cache: MomentCache, question: list[int], step: Callable[[], None]) -> str:
    """The greedy answer, at most ANSWER tokens."""
    end = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])}
    answer: list[int] = []
    given = question
    while len(answer) < ANSWER:
        token = int(_forward(model, cache, given).argmax())
        step()
        if token in ends:
            break
        answer.append(token)
        given = [token]
    return tokenizer.decode(answer, skip_special_tokens=True).strip()


def _plans(budget: str) -> list[tuple[str, str, str]]:
    """Rows to come: name, method, budget. The last pays for its summary out of the bytes of the others' tokens."""
    rows = [("full cache", "full", budget), *((name, method, budget) for name, method in METHODS.items())]
    parsed = Budget.parse(budget)
    return [*rows, ("MomentKV, equal bytes", "momentkv", f"{parsed}te")] if parsed.kind == "tokens" else rows


def _measure(model: Any, tokenizer: Any, text: Text, exact: Prefill, budget: str, show: Console) -> list[Row]:
    rows: list[Row] = []
    plans = _plans(budget)
    with Progress(console=show, transient=True, disable=not show.is_terminal) as bar:
        task = bar.add_task("decoding", total=len(plans) * (CONTINUATION - 1 + ANSWER))

        def step() -> None:
            bar.advance(task)

        for done, (name, method, size) in enumerate(plans):
            bar.update(task, description=name, completed=done * (CONTINUATION - 1 + ANSWER))
            try:
                cache = exact.compress(size, method)
            except ValueError as error:
                if size == budget:
                    raise
                note(f"no row {name!r}: {error}")
                continue
            report = cache.report()
            log_probs, ms = _follow(model, cache, exact.logits, text.continuation, step)
            answer = _answer(model, tokenizer, exact.compress(size, method), text.question, step)
            rows.append(Row(name, method, size, report, log_probs, answer, ms))
            if not show.is_terminal:
                note(f"{name}: done")
    return rows


@torch.no_grad()
def run(args: Namespace) -> int:
    """Run `momentkv demo`; the arguments are those of the command line. Returns the exit status."""
    for method in METHODS.values():
        check_method(args.budget, method)
    source = read_text(args.document) if args.document else _reference()
    show = Console(stderr=True)
    model, tokenizer = models.load(args.model, device=args.device, dtype=args.dtype, offline=args.offline)
    text = Text.of(tokenizer, source, args.tokens)
    start = time.perf_counter()
    if not show.is_terminal:
        note(f"exact prefill of {len(text.prompt):,} tokens")
    with attend(model), LayerProgress(model, f"exact prefill of {len(text.prompt):,} tokens") as progress:
        exact = prefill(model, torch.tensor([text.prompt], device=model.device))
        progress.close()
        prefilled = time.perf_counter()
        rows = _measure(model, tokenizer, text, exact, args.budget, show)
    end = time.perf_counter()
    facts = {
        "versions": {
            "momentkv": momentkv.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": args.model,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "document": args.document or "the Python language reference (pydoc_data.topics)",
        "document_tokens": text.document_tokens,
        "prompt_tokens": len(text.prompt),
        "continuation_tokens": len(text.continuation),
        "needle": NEEDLE,
        "needle_depth": round(text.needle_depth, 3),
        "question": QUESTION,
        "budget": args.budget,
        "seconds": {"prefill": round(prefilled - start, 2), "methods": round(end - prefilled, 2)},
    }
    demo_table.show(facts, demo_table.figures(rows, text.continuation, NUMBER), args.json)
    return 0


def _reference() -> str:
    """The language reference that comes with Python: half a megabyte of text that every machine has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
