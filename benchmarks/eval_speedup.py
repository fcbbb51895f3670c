"""How much faster one prefill for all variants is than a run of each variant by itself, in `momentkv eval`.

    python benchmarks/eval_speedup.py --tasks ruler/niah_single_2,ruler/vt --data DIR --length 2048

Gate: every answer must be the one of the separate run. Where floating-point ties make one differ, it is counted and
shown, and with more than one in twenty no speed is printed. Per sample both ways run one after the other.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from momentkv.evals.measure import Setup, measure
from momentkv.evals.task import Source
from momentkv.evals.tasks import tasks_of
from momentkv.evals.variants import variants_of
from momentkv.hf.models import load

TIES = 0.05  # share of answers that may differ


def run(setup: Setup, task: Any, sample: Any) -> tuple[float, dict[str, str]]:
    """Seconds, and the answer of every variant."""
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    measure(setup, task, sample, rows.append)
    return time.perf_counter() - start, {row["variant"]: row["pred"] for row in rows}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tasks", default="ruler/niah_single_2")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--texts", nargs="+", type=Path, default=[], help="haystack of niah")
    parser.add_argument("--methods", default="all")
    parser.add_argument("--budgets", default="128")
    parser.add_argument("--protocol", choices=("aware", "agnostic"), default="agnostic")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--limit", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model, dtype=args.dtype)
    variants = variants_of(args.methods.split(","), args.budgets.split(","))
    source = Source(tokenizer, args.data, tuple(args.texts), limit=args.limit, length=args.length)
    ratios, differing, answers, seconds = [], 0, 0, []
    for task in tasks_of(args.tasks.split(","), args.texts):
        for sample in task.samples(source):
            together, found = run(Setup(model, tokenizer, variants, args.protocol), task, sample)
            alone = 0.0
            for variant in variants:
                took, own = run(Setup(model, tokenizer, [variant], args.protocol), task, sample)
                alone += took
                differing += own[variant.key] != found[variant.key]
                answers += 1
            ratios.append(alone / together)
            seconds.append((together, alone))
            print(f"{task.full_name} {sample.id}: together {together:.1f} s, one by one {alone:.1f} s", flush=True)
    if differing > TIES * answers:
        raise SystemExit(f"{differing} of {answers} answers differ from the separate runs: no speed is reported")
    result = {
        "model": args.model,
        "variants": len(variants),
        "samples": len(ratios),
        "answers": answers,
        "answers_differing": differing,
        "speedup_median": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
    }
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{len(variants)} variants: {result['speedup_median']:.1f} times as fast as one by one "
        f"({min(ratios):.1f} to {max(ratios):.1f}, {len(ratios)} samples); {differing} of {answers} answers differ"
    )


if __name__ == "__main__":
    main()
