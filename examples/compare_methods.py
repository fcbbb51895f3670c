"""One exact prefill, several methods at one budget: bytes held, and how often they predict what the full cache does."""

import argparse
from pydoc_data.topics import topics

import torch

from momentkv.hf import MomentCache, attend, prefill
from momentkv.hf.compat import cache_argument
from momentkv.hf.models import load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="demo", help='a model folder, a Hugging Face id or "demo" (default)')
parser.add_argument("--methods", nargs="+", default=["streaming", "h2o", "snapkv", "adakv", "momentkv"])
parser.add_argument("--budget", default="128", help="tokens per head, a share, or bytes")
parser.add_argument("--tokens", type=int, default=1500, help="of the text to read")
parser.add_argument("--next", type=int, default=32, help="tokens of its continuation to predict")
args = parser.parse_args()

model, tokenizer = load(args.model)
text = "\n\n".join(topics[name] for name in sorted(topics))  # the language reference that comes with Python
size = args.tokens + args.next
ids = tokenizer(text[: 16 * size], return_tensors="pt", verbose=False).input_ids[:, :size].to(model.device)
prompt, following = ids[:, : args.tokens], ids[:, args.tokens :]
exact = prefill(model, prompt, mass=True)  # H2O wants the accumulated attention


@torch.no_grad()
def predictions(cache: MomentCache) -> torch.Tensor:
    """The most likely token after the prompt and after each token of its continuation but the last."""
    logits = [exact.logits]
    with attend(model):
        for token in following[0, :-1]:
            logits.append(model(token.view(1, 1), use_cache=True, **cache_argument(cache)).logits[:, -1])
    return torch.cat(logits).argmax(-1)


full = exact.compress(method="full")
full_bytes = full.report().total
expected = predictions(full)
print(f"{prompt.shape[1]} tokens, budget {args.budget}; the full cache holds {full_bytes:,} bytes")
print(f"{'method':<12}{'tokens/head':>12}{'bytes':>14}{'of full':>9}{'summary':>12}{'agreement':>11}")
for method in args.methods:
    cache = exact.compress(args.budget, method)
    report = cache.report()
    same = (predictions(cache) == expected)[1:].float().mean()  # the first token is exact for every method
    print(
        f"{method:<12}{report.tokens_per_head:>12.0f}{report.total:>14,}{report.total / full_bytes:>9.1%}"
        f"{report.summary:>12,}{same:>11.0%}"
    )
