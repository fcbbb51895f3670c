"""Relative attention-output error and KL of the paper's method and its parts, on real text.

    python benchmarks/attention_error.py --model demo --texts a.txt b.txt --budget 128
    python benchmarks/attention_error.py --kl            # also KL of the next-token distribution

Without --texts it takes three texts that every Python installation has.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path

import torch

from momentkv.evals import attention_error
from momentkv.hf import attend, prefill
from momentkv.hf.compat import cache_argument
from momentkv.hf.models import load
from momentkv.methods import settings_for

VARIANTS = {
    "snapkv selection, no correction": ("snapkv", {}),
    "snapkv selection, zeroth order, Jensen": ("snapkv", {"correction": "zeroth"}),
    "snapkv selection, first order, Jensen": ("snapkv", {"correction": "first"}),
    "snapkv selection, first order, log(1 + var/2)": ("snapkv", {"correction": "first", "mass": "variance"}),
    "snapkv + 33 tokens, no correction": ("snapkv", {"extra": 33}),
    "snapkv + 66 tokens, no correction": ("snapkv", {"extra": 66}),
    "snapkv unpooled, no correction": ("snapkv", {"kernel": 1}),
    "snapkv unpooled, first order, Jensen": ("snapkv", {"kernel": 1, "correction": "first"}),
    "ada-kv, no correction": ("adakv", {}),
    "ada-kv, first order, Jensen (momentkv default)": ("momentkv", {}),
    "moment-informed (paper), no correction": ("momentkv:paper", {"correction": "off"}),
    "moment-informed (paper), first order, Jensen": ("momentkv:paper", {}),
    "moment-informed, 1 round, no correction": ("momentkv:paper", {"rounds": 1, "correction": "off"}),
    "moment-informed, no blocks, first order": ("momentkv:paper", {"block": 1}),
}


def standard_texts() -> dict[str, str]:
    """Three real texts that come with Python: documentation, code, and the code of another hand."""
    import _pydecimal
    import argparse as module
    from pydoc_data import topics

    reference = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return {
        "reference": reference,
        "code": inspect.getsource(module),
        "decimal": inspect.getsource(_pydecimal),
    }


@torch.no_grad()
def log_probabilities(model, cache, ids) -> torch.Tensor:
    """After each of the given tokens, fed one by one, `[tokens, vocabulary]`."""
    with attend(model):
        steps = (model(x, **cache_argument(cache), use_cache=True).logits[:, -1] for x in ids.split(1, dim=1))
        return torch.cat([x.log_softmax(-1) for x in steps])


def measure(model, ids, prompt, follow, budget, variants, kl) -> dict[str, dict[str, float]]:
    whole = prefill(model, ids[:, : prompt + follow], window=follow + 64)
    record = prefill(model, ids[:, :prompt]) if kl else None
    follows = ids[:, prompt : prompt + follow]
    full = log_probabilities(model, record.compress(method="full"), follows) if record is not None else None
    rows = {}
    for name in variants:
        method, options = VARIANTS[name]
        options = dict(options)
        tokens = budget + options.pop("extra", 0)
        settings = settings_for(method, **options)
        layers = [attention_error(e, prompt, settings, tokens) for e in whole.layers]
        stack = {k: torch.stack([getattr(x, k) for x in layers]) for k in vars(layers[0])}
        rows[name] = {
            "error": stack["corrected"].mean().item(),
            "plain": stack["plain"].mean().item(),
            "worse": (stack["corrected"] > stack["plain"]).float().mean().item(),
            "w_E": stack["evicted_weight"].mean().item(),
            "cos_RE": stack["cosine"].mean().item(),
            "cos_estimate": stack["cosine_estimate"].mean().item(),
        }
        if record is not None and full is not None:
            ours = log_probabilities(model, record.compress(tokens, method, **options), follows)
            values = (full.exp() * (full - ours)).sum(-1)
            rows[name] |= {"kl": values.mean().item(), "kl_median": values.median().item()}
        print(f"  {name}: {json.dumps({k: round(v, 4) for k, v in rows[name].items()})}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--texts", nargs="+", type=Path, default=[])
    parser.add_argument("--skip", type=int, default=20_000, help="characters left out at the start of each file")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--follow", type=int, default=128)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--kl", action="store_true")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    texts = {path.stem: path.read_text(encoding="utf-8")[args.skip :] for path in args.texts} or standard_texts()
    results = {}
    for name, text in texts.items():
        print(name, file=sys.stderr)
        ids = tokenizer(text[: 8 * (args.prompt + args.follow)], return_tensors="pt").input_ids
        results[name] = measure(model, ids, args.prompt, args.follow, args.budget, args.variants, args.kl)
    print(json.dumps({"model": args.model, "budget": args.budget, "prompt": args.prompt, "texts": results}, indent=1))


if __name__ == "__main__":
    main()
