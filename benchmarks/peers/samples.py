"""Write samples as token ids, so that two libraries with two versions of transformers read the very same prompt.

    python benchmarks/peers/samples.py --model MODEL --data DATA --out samples.jsonl

Under "agnostic" the context is compressed before the question is read; under "aware" the question is part of the
context and `question` is empty. The identifier of a sample names its task and protocol.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from momentkv.evals.prompts import prompt_of, stop_tokens
from momentkv.evals.task import Source, Task
from momentkv.evals.tasks import tasks_of
from momentkv.hf.models import load

RULER = "ruler/niah_single_1,ruler/niah_single_2,ruler/niah_multikey_1,ruler/vt"
LONGBENCH = "longbench/qasper,longbench/2wikimqa,longbench/trec,longbench/samsum,longbench/lcc"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", default=f"{RULER},{LONGBENCH}")
    parser.add_argument("--protocols", default="agnostic")
    parser.add_argument("--limit", type=int, default=3, help="samples per task")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a RULER sample, answer included")
    parser.add_argument("--max-tokens", type=int, default=3300, help="longer LongBench prompts are left out")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="cap on the task's own length of the answer")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def rows_of(task: Task, source: Source, protocol: Any, model: Any, cap: int) -> list[dict[str, Any]]:
    """The samples of a task under one protocol."""
    rows = []
    for sample in task.samples(source):
        prompt = prompt_of(sample, source.tokenizer, protocol)
        stops, not_first = stop_tokens(model, source.tokenizer, sample)
        rows.append(
            {
                "sample": f"{task.full_name}/{sample.id}/{protocol}",
                "task": task.full_name,
                "protocol": protocol,
                "context": prompt.context,
                "question": prompt.question,
                "answers": list(sample.answers),
                "all_classes": list(sample.all_classes),
                "max_new_tokens": min(cap, sample.max_new_tokens),
                "stops": sorted(stops),
                "not_first": sorted(not_first),
            }
        )
    return rows


def main() -> None:
    args = parsed()
    model, tokenizer = load(args.model)
    source = Source(tokenizer, args.data, limit=args.limit, length=args.length, max_tokens=args.max_tokens)
    tasks = tasks_of(args.tasks.split(","))
    rows = [
        row
        for protocol in args.protocols.split(",")
        for task in tasks
        for row in rows_of(task, source, protocol, model, args.max_new_tokens)
    ]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for row in rows:
        print(f"{row['sample']}: {len(row['context'])} + {len(row['question'])} tokens")


if __name__ == "__main__":
    main()
