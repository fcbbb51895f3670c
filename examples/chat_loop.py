"""Chat in fixed memory: the conversation grows, the cache does not."""

import argparse

import torch

from momentkv.hf import MomentCache, attend
from momentkv.hf.compat import cache_argument
from momentkv.hf.models import load

SCRIPT = ("Name three rivers in Europe.", "Which of them is the longest?", "Tell me more about it.", "Thank you!")
MARK = "momentkv-answer"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="demo", help='a model folder, a Hugging Face id or "demo" (default)')
parser.add_argument("--interactive", action="store_true", help="type yourself; an empty line ends")
parser.add_argument("--budget", default="64", help="tokens per head, or bytes")
parser.add_argument("--new", type=int, default=80, help="tokens of each answer, at most")
args = parser.parse_args()


def turn(text: str, history: list[int]) -> list[int]:
    """What the chat template puts between the last answer and the next; the history itself is never written anew."""
    user = {"role": "user", "content": text}
    if not history:
        full = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        return tokenizer(full, add_special_tokens=False).input_ids
    before = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
    full = tokenizer.apply_chat_template([*before, user], tokenize=False, add_generation_prompt=True)
    between = full.partition(MARK)[2]
    if history[-1] == tokenizer.eos_token_id:
        between = between.removeprefix(tokenizer.eos_token)
    return tokenizer(between, add_special_tokens=False).input_ids


model, tokenizer = load(args.model)
cache, history = MomentCache(model.config, args.budget), []
with attend(model):
    for text in iter(lambda: input("> ").strip(), "") if args.interactive else SCRIPT:
        if not args.interactive:
            print(">", text)
        ids = torch.tensor([history + turn(text, history)], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new, do_sample=False, **cache_argument(cache)
        )
        history = out[0].tolist()
        print(tokenizer.decode(history[ids.shape[1] :], skip_special_tokens=True).strip())
        print(f"[{cache.get_seq_length()} tokens seen, {cache.report().total:,} bytes held]\n")
