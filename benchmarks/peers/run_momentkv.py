"""The same as run_kvpress.py with momentkv's SnapKV and Ada-KV, in the project's own environment.

    python benchmarks/peers/run_momentkv.py --model MODEL --samples samples.jsonl --out momentkv.jsonl

Every method runs with momentkv's defaults, with kvpress's settings ("matched"), with the latter but for one setting at
a time, and with the question read token by token ("matched, one by one"): read at once, a question is a chunk, after
which momentkv compresses to the budget again, and kvpress does not. An interrupted run goes on where it stopped.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lines import FULL, METHODS, Results, read

from momentkv.evals.generation import answer
from momentkv.hf import MomentCache, attend, prefill
from momentkv.hf.compat import cache_argument
from momentkv.hf.models import load
from momentkv.hf.prefill import Prefill

ONE_BY_ONE = "matched, one by one"
DEFAULTS: dict[str, Any] = {"sinks": 4, "window": 32, "kernel": 7, "decoding": "evict"}


def settings_of(method: str) -> dict[str, dict[str, Any]]:
    """Options by the name of their setting."""
    matched = {"preset": "kvpress"}
    named: dict[str, dict[str, Any]] = {"default": {}, "matched": matched, ONE_BY_ONE: matched}
    named |= {f"matched but {name}={value}": matched | {name: value} for name, value in DEFAULTS.items()}
    if method == "adakv":
        named["matched but allocation=adaptive"] = matched | {"allocation": "adaptive"}
    return named


def kept_positions(cache: MomentCache) -> list[list[list[int]]]:
    """Positions per layer and head, ascending."""
    heads = range(cache.config.num_key_value_heads)
    return [[cache.positions(layer, head).tolist() for head in heads] for layer in range(len(cache.layers))]


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


def read_one_by_one(model: Any, cache: MomentCache, token_ids: list[int]) -> None:
    """As decode steps, which never evict with `decoding="grow"`."""
    with attend(model):
        for token in token_ids:
            model(input_ids=torch.tensor([[token]]), use_cache=True, **cache_argument(cache))


@torch.no_grad()
def measure(model: Any, tokenizer: Any, sample: dict[str, Any], budgets: list[int]) -> list[dict[str, Any]]:
    """All rows of one sample, derived from one prefill and decoded as one batch."""
    with attend(model):
        exact = prefill(model, torch.tensor([sample["context"]]))
    rows, caches = caches_of(exact, sample, budgets)

    def done(group: list[int], index: int, tokens: list[int]) -> None:
        rows[group[index]] |= {"tokens": tokens, "text": tokenizer.decode(tokens, skip_special_tokens=True)}

    stops, not_first = set(sample["stops"]), set(sample["not_first"])
    question = sample["question"]
    for apart in (False, True):
        group = [i for i, row in enumerate(rows) if (row["setting"] == ONE_BY_ONE) == apart]
        mine = [caches[i] for i in group]
        ahead = question[:-1] if apart else []
        for cache in mine:
            read_one_by_one(model, cache, ahead)
        rest = question[len(ahead) :]
        finished = partial(done, group)
        answer(model, mine, exact.logits, rest, sample["max_new_tokens"], stops, not_first, finished)
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
