"""Answers and kept positions of kvpress's SnapKV and Ada-KV, in the environment that make_venv.sh makes.

    benchmarks/peers/.venv-kvpress/bin/python benchmarks/peers/run_kvpress.py --model MODEL --samples samples.jsonl \
        --out kvpress.jsonl

The press is a context manager around the prefill, as documented; the question and the answer follow without it, at the
positions that they have in the whole text. An interrupted run goes on where it stopped.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from kvpress import AdaKVPress, SnapKVPress  # type: ignore[import-not-found]
from lines import FULL, METHODS, Results, read
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


class Watched(SnapKVPress):
    """SnapKV that remembers its scores, from which what it keeps can be told. scores: `[b, h, n]` per layer."""

    def score(self, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        scores = super().score(module, *args, **kwargs)
        self.scores[module.layer_idx] = scores.clone()  # Ada-KV writes into them
        return scores


def press_for(method: str, budget: int, tokens: int) -> tuple[Any, Watched]:
    """A press that keeps exactly `budget` of `tokens`, and the SnapKV in it. kvpress rounds the kept count down."""
    watched = Watched(compression_ratio=1 - (budget + 0.5) / tokens)
    watched.scores = {}
    return (watched if method == "snapkv" else AdaKVPress(watched)), watched


def kept_positions(model: Any, cache: Any, watched: Watched, method: str, budget: int) -> list[list[list[int]]]:
    """Positions per layer and head, ascending, right after the prefill."""
    kept = []
    for index, layer in enumerate(model.model.layers):
        scores = watched.scores[index]
        mask = torch.zeros(scores.shape[1:], dtype=torch.bool)
        if method == "snapkv":
            assert cache.layers[index].keys.shape[2] == budget
            mask.scatter_(-1, scores[0].topk(budget, dim=-1).indices, True)
        else:
            _, head, position = layer.self_attn.masked_key_indices
            mask[:] = True
            mask[head, position] = False
        assert int(mask.sum()) == budget * len(mask)
        kept.append([row.nonzero().flatten().tolist() for row in mask])
    return kept


def answer(model: Any, cache: DynamicCache, logits: Tensor, sample: dict[str, Any]) -> list[int]:
    """Read the question, then decode greedily. logits: after the context, `[vocabulary]`."""
    position, new = len(sample["context"]), list(sample["question"])
    tokens: list[int] = []
    while True:
        if new:
            ids = torch.tensor([new])
            where = torch.arange(position, position + len(new)).unsqueeze(0)
            logits = model(input_ids=ids, past_key_values=cache, position_ids=where, logits_to_keep=1).logits[0, -1]
            position += len(new)
        if not tokens and sample["not_first"]:
            logits = logits.index_fill(0, torch.tensor(sample["not_first"]), -torch.inf)
        token = int(logits.argmax())
        if token in sample["stops"]:
            return tokens
        tokens.append(token)
        if len(tokens) == sample["max_new_tokens"]:
            return tokens
        new = [token]


@torch.no_grad()
def measure(model: Any, tokenizer: Any, sample: dict[str, Any], method: str, budget: int) -> dict[str, Any]:
    """One sample with one press (or none: method "full"), as a row."""
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None  # of the sample before
    cache = DynamicCache(config=model.config)
    press, watched = press_for(method, budget, len(sample["context"])) if budget else (None, None)
    with press(model) if press is not None else nullcontext():
        ids = torch.tensor([sample["context"]])
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
    kept = None if watched is None else kept_positions(model, cache, watched, method, budget)
    tokens = answer(model, cache, logits, sample)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return {"tokens": tokens, "text": text, "kept": kept}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--budgets", default="128,256")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    results = Results(args.out)
    presses: list[dict[str, Any]] = [
        {"method": m, "budget": int(b), "setting": "kvpress"} for b in args.budgets.split(",") for m in METHODS
    ]
    for sample in read(args.samples):
        for what in [FULL, *presses]:
            if results.has(sample["sample"], what["method"], what["budget"], what["setting"]):
                continue
            start = time.perf_counter()
            row = measure(model, tokenizer, sample, what["method"], what["budget"])
            results.write({"sample": sample["sample"], **what, **row})
            print(sample["sample"], *what.values(), f"{time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
