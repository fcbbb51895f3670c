"""Read a document once, save its compressed cache, and ask several questions without reading it again."""

import argparse
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch

from momentkv.hf import MomentCache, attend
from momentkv.hf.compat import cache_argument
from momentkv.hf.models import load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="demo", help='a model folder, a Hugging Face id or "demo" (default)')
parser.add_argument("--document", type=Path, help="UTF-8 text; default: Python's reference on exceptions and with")
parser.add_argument("--question", action="append", help="may be repeated")
parser.add_argument("--budget", default="256", help="tokens per head, a share, or bytes")
parser.add_argument("--tokens", type=int, default=2000, help="of the document, at most")
parser.add_argument("--new", type=int, default=48, help="tokens of each answer, at most")
args = parser.parse_args()

questions = args.question or ["What does a finally clause do?", "What is a context manager?"]
text = args.document.read_text() if args.document else topics["try"] + topics["with"] + topics["exceptions"]
model, tokenizer = load(args.model)
before, after, mark = "", "\nAnswer:", "momentkv-text"
if tokenizer.chat_template:  # the document and the question are one message: split the template where its text goes
    message = [{"role": "user", "content": mark}]
    before, _, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).partition(
        mark
    )


def encode(text: str, special: bool = False) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt", verbose=False, add_special_tokens=special).input_ids


def ask(file: Path, question: str) -> str:
    """The cache never changes on disk, so each question starts from the document alone."""
    cache = MomentCache.load(file, model.config, model.device)
    ids = torch.cat([cache.token_ids, encode(f"\n\n{question}{after}")], 1).to(model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new, do_sample=False, **cache_argument(cache)
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


with tempfile.TemporaryDirectory() as folder, attend(model), torch.no_grad():
    file = Path(folder) / "document.safetensors"
    document = encode(before + text, special=not before)[:, : args.tokens]
    cache = MomentCache(model.config, args.budget)
    model(document.to(model.device), use_cache=True, logits_to_keep=1, **cache_argument(cache))
    cache.save(file, document)
    print(f"{document.shape[1]} tokens in a file of {file.stat().st_size:,} bytes")
    for question in questions:
        print(f"\n{question}\n{ask(file, question)}")
