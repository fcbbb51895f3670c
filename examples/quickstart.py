"""Continue a long text while every layer holds 128 tokens per KV head and a summary of the rest."""

import argparse
from pydoc_data.topics import topics

from momentkv.hf import MomentCache, attend
from momentkv.hf.compat import cache_argument
from momentkv.hf.models import load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="demo", help='a model folder, a Hugging Face id or "demo" (default)')
parser.add_argument("--tokens", type=int, default=1500, help="of the text to read")
parser.add_argument("--new", type=int, default=60, help="tokens to generate")
args = parser.parse_args()

model, tokenizer = load(args.model)
text = "\n\n".join(topics[name] for name in sorted(topics))  # the language reference that comes with Python
ids = tokenizer(text[: 16 * args.tokens], return_tensors="pt", verbose=False).input_ids[:, : args.tokens]
ids = ids.to(model.device)
cache = MomentCache(model.config, budget=128)
with attend(model):
    out = model.generate(
        ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=args.new, do_sample=False, **cache_argument(cache)
    )
print(tokenizer.decode(out[0, ids.shape[1] :]))
print(cache.report())
