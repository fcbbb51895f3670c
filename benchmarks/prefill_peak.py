"""KV bytes alive at the peak of a prefill, and the process's peak memory: stock cache against a compressed one.

    python benchmarks/prefill_peak.py --model demo --tokens 8000 --budget 128

Every variant runs in a process of its own. KV bytes are those of all live tensors with the shape of keys or values,
counted after each decoder layer.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys

import torch


def alive(shapes: set[int]) -> int:
    """Bytes of distinct live storages whose tensors end in `[..., d]` with a token axis: keys, values, states."""
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dim() in (3, 4) and x.shape[-1] in shapes]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def run(model_name: str, tokens: int, budget: int, method: str) -> dict[str, float]:
    from pydoc_data import topics

    from momentkv.hf import MomentCache, attend
    from momentkv.hf.compat import cache_argument
    from momentkv.hf.models import load

    model, tokenizer = load(model_name)
    config = model.config.get_text_config()
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = tokenizer(text[: tokens * 8], return_tensors="pt").input_ids[:, :tokens]
    base_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cache, peaks = MomentCache(model.config, budget, method), []
    layers = model.get_decoder().layers
    hooks = [x.register_forward_hook(lambda *_: peaks.append(alive({d}))) for x in layers]
    with attend(model), torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1, **cache_argument(cache))
    [h.remove() for h in hooks]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"kv_bytes_peak": max(peaks), "cache_bytes": cache.report().total, "peak_rss_above_model": rss - base_rss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run(args.model, args.tokens, args.budget, args.only)))
        return
    for method in ("full", "adakv", "momentkv"):
        command = [sys.executable, __file__, "--only", method, "--model", args.model]
        command += ["--tokens", str(args.tokens), "--budget", str(args.budget)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(method, done.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
