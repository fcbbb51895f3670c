"""The same as run_kvpress.py with momentkv's SnapKV and Ada-KV, in the project's own environment.

    python benchmarks/peers/run_momentkv.py --model MODEL --samples samples.jsonl --out momentkv.jsonl

Every method runs with momentkv's defaults, with kvpress's settings ("matched"), and with the latter but for one setting
at a time. An interrupted run goes on where it stopped.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from lines import FULL, METHODS, Results, read

from momentkv.evals.generation import answer
from momentkv.hf import MomentCache, attend, prefill
from momentkv.hf.models import load
from momentkv.hf.prefill import Prefill

MATCHED: dict[str, Any] = {"sinks": 0, "window": 64, "kernel": 5, "decoding": "grow"}
ADAPTIVE: dict[str, Any] = {"allocation": "adaptive-floor", "alpha": 0.0}  # why 0: docs/peers.md
DEFAULTS: dict[str, Any] = {"sinks": 4, "window": 32, "kernel": 7, "decoding": "evict"}


def settings_of(method: str) -> dict[str, dict[str, Any]]:
    """Options by the name of their setting."""
    matched = MATCHED | (ADAPTIVE if method == "adakv" else {})
    named = {"default": {}, "matched": matched}
    named |= {f"matched but {name}={value}": matched | {name: value} for name, value in DEFAULTS.items()}
    if method == "adakv":
        named["matched but alpha=0.2"] = matched | {"alpha": 0.2}
        named["matched but allocation=adaptive"] = matched | {"allocation": "adaptive", "alpha": 0.2}
    return named


def kept_positions(cache: MomentCache) -> list[list[list[int]]]:
    """Positions per layer and head, ascending."""
    kept = []
    for layer in cache.layers:
        positions = layer.state.dense(layer.state.positions)[0]
        kept.append([sorted(p for p in head if p >= 0) for head in positions.tolist()])
    return kept


def choices(budgets: list[int]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What identifies a row, and the arguments of its cache."""
    return [
        ({"method": method, "budget": budget, "setting": setting}, {"budget": budget, "method": method, **options})
        for budget in budgets
        for method in METHODS
        for setting, options in settings_of(method).items()
    ]


def caches_of(
    exact: Prefill, sample: dict[str, Any], budgets: list[int]
) -> tuple[list[dict[str, Any]], list[MomentCache]]:
    """Rows without their answers, and their caches; the first is the full cache in a form that can be a row."""
    room = exact.tokens + len(sample["question"]) + sample["max_new_tokens"] + 1
    rows, caches = [FULL | {"kept": None}], [exact.compress(room, "streaming", sinks=0, decoding="grow")]
    for row, arguments in choices(budgets):
        caches.append(exact.compress(**arguments))
        rows.append(row | {"kept": kept_positions(caches[-1])})
    return rows, caches


@torch.no_grad()
def measure(model: Any, tokenizer: Any, sample: dict[str, Any], budgets: list[int]) -> list[dict[str, Any]]:
    """All rows of one sample, derived from one prefill and decoded as one batch."""
    with attend(model):
        exact = prefill(model, torch.tensor([sample["context"]]))
    rows, caches = caches_of(exact, sample, budgets)

    def done(index: int, tokens: list[int]) -> None:
        rows[index] |= {"tokens": tokens, "text": tokenizer.decode(tokens, skip_special_tokens=True)}

    stops, not_first = set(sample["stops"]), set(sample["not_first"])
    answer(model, caches, exact.logits, sample["question"], sample["max_new_tokens"], stops, not_first, done)
    return [{"sample": sample["sample"], **row} for row in rows]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--budgets", default="128,256")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model, dtype="float32")
    results, budgets = Results(args.out), [int(b) for b in args.budgets.split(",")]
    for sample in read(args.samples):
        if all(results.has(sample["sample"], **row) for row in [FULL, *(row for row, _ in choices(budgets))]):
            continue
        start = time.perf_counter()
        for row in measure(model, tokenizer, sample, budgets):
            if not results.has(row["sample"], row["method"], row["budget"], row["setting"]):
                results.write(row)
        print(f"{sample['sample']} {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
