"""The job of `momentkv generate`: prompt in, text streamed out, the cache saved or loaded on the way."""

import ast
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from momentkv.budgets import Budget
from momentkv.hf import models
from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.compat import cache_argument
from momentkv.hf.plan import Plan
from momentkv.hf.progress import LayerProgress
from momentkv.hf.prompt import Turn, encode, note, read_text
from momentkv.hf.saving import CacheFileError
from momentkv.methods import settings_for


class _Stream(TextStreamer):
    """Text to stdout as it comes. ready: called once, when the cache holds the prompt and before any text."""

    def __init__(self, tokenizer: Any, ready: Callable[[], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.ready: Callable[[], None] | None = ready

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt and self.ready is not None:
            self.ready()
            self.ready = None
        super().put(value)


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`name=value` pairs; a value that is no Python literal (32, 0.5, None, True) is a string."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set {pair!r}: expected name=value, as in --set window=64")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def check_method(budget: Budget | str, method: str, preset: str | None = None, pairs: list[str] | None = None) -> None:
    """Raise a ValueError for an unknown or impossible method, preset, option or budget, before any work."""
    try:
        settings = settings_for(method, preset, **parse_options(pairs or []))
    except TypeError as error:  # a comparison inside: the value is of another type
        raise ValueError(f"--set {' '.join(pairs or [])}: a value has the wrong type ({error})") from error
    if settings is not None:
        Plan(settings, Budget.parse(budget), 1).check()


def _check(args: Namespace) -> None:
    check_method(args.budget or "128", args.method or "momentkv", args.preset, args.set)
    if args.load_cache and args.set:
        raise ValueError("--set cannot change a saved cache: leave it out with --load-cache")
    if args.load_cache and not Path(args.load_cache).is_file():
        raise CacheFileError(f"--load-cache {args.load_cache!r}: there is no such file")
    if args.save_cache and not Path(args.save_cache).absolute().parent.is_dir():
        raise CacheFileError(f"--save-cache {args.save_cache!r}: its folder does not exist")
    if args.system and args.no_chat_template:
        raise ValueError("--system needs the chat template: leave out --no-chat-template")
    if args.max_new_tokens == 0 and not (args.save_cache or args.report):
        raise ValueError("--max-new-tokens 0 does nothing without --save-cache or --report")
    if not (args.prompt or args.prompt_file or args.load_cache):
        raise ValueError("no prompt: pass --prompt TEXT, --prompt-file FILE, or '-' for standard input")
    if args.prompt == args.prompt_file == "-":
        raise ValueError("--prompt and --prompt-file cannot both read standard input")


def _load_cache(args: Namespace, model: Any, tokenizer: Any, turn: Turn) -> MomentCache:
    expected = {"budget": args.budget, "method": args.method, "preset": args.preset}
    cache = MomentCache.load(args.load_cache, model.config, model.device, **expected)
    if cache.token_ids is None or cache.token_ids.shape[0] != 1:
        raise CacheFileError(f"{args.load_cache!r} holds no token ids of one prompt: write it with --save-cache")
    start = tokenizer.decode(cache.token_ids[0, : len(encode(tokenizer, turn.before)) + 1].tolist())
    if not "".join(start.split()).startswith("".join(turn.before.split())):
        note(f"warning: {args.load_cache!r} starts differently: was it saved with other --system or template options?")
    return cache


def _sampling(args: Namespace, model: Any) -> dict[str, Any]:
    config = model.generation_config
    end = config.eos_token_id
    pad = config.pad_token_id if config.pad_token_id is not None else end[0] if isinstance(end, list) else end
    if args.seed is not None:
        torch.manual_seed(args.seed)
    if args.temperature == 0 or (args.temperature is None and args.top_p is None):
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "pad_token_id": pad}
    return {"do_sample": True, "temperature": args.temperature or 1.0, "top_p": args.top_p or 1.0, "pad_token_id": pad}


def run(args: Namespace) -> int:
    """Run `momentkv generate`; the arguments are those of the command line. Returns the exit status."""
    _check(args)
    document = read_text(args.prompt_file) if args.prompt_file else ""
    question = read_text("-") if args.prompt == "-" else args.prompt or ""
    model, tokenizer = models.load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        offline=args.offline,
        trust_remote_code=args.trust_remote_code,
    )
    turn = Turn() if args.no_chat_template else Turn.of(tokenizer, args.system)
    cache = _load_cache(args, model, tokenizer, turn) if args.load_cache else None
    seen = cache.token_ids[0].tolist() if cache is not None and cache.token_ids is not None else []
    kept, rest = _texts(turn, [t for t in (document, question) if t], bool(seen), bool(args.save_cache))
    special = args.no_chat_template and not seen
    kept_ids, rest_ids = encode(tokenizer, kept, special), encode(tokenizer, rest, special and not kept)
    if args.max_new_tokens == 0 and args.save_cache:
        rest_ids = []  # compress and save, no more
    ids = torch.tensor([seen + kept_ids + rest_ids], device=model.device)
    if ids.shape[1] == len(seen):
        raise ValueError("there is nothing to continue with: pass --prompt TEXT or --prompt-file FILE")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and ids.shape[1] + args.max_new_tokens > limit:
        note(f"warning: {ids.shape[1]} + {args.max_new_tokens} tokens are more than the {limit} this model is made for")
    if cache is None:
        options = {"prompt_tokens": ids.shape[1], **parse_options(args.set)}
        cache = MomentCache(model.config, args.budget or "128", args.method or "momentkv", args.preset, **options)
    _feed(args, model, tokenizer, cache, ids, len(seen) + len(kept_ids))
    if args.report:
        print(cache.report(), file=sys.stderr)
    return 0


def _texts(turn: Turn, said: list[str], continued: bool, saving: bool) -> tuple[str, str]:
    """What goes into the cache before it is saved, and what follows: the question, and the end of the turn."""
    lead = turn.before if not continued else turn.join if said else ""
    if not saving:
        return "", lead + turn.join.join(said) + turn.after
    return lead + "".join(said[:1]), "".join(turn.join + text for text in said[1:]) + turn.after


def _feed(args: Namespace, model: Any, tokenizer: Any, cache: MomentCache, ids: torch.Tensor, kept: int) -> None:
    """Prefill what the cache has not seen of `ids`, save after the first `kept` tokens if asked to, and generate."""
    bounds = {kept, ids.shape[1]} if args.save_cache else {ids.shape[1]}
    if args.prefill_chunk:
        starts = (cache.get_seq_length(), kept) if args.save_cache else (cache.get_seq_length(),)
        bounds |= {i for start in starts for i in range(start, ids.shape[1], args.prefill_chunk)}
    ends = sorted(end for end in bounds if end > cache.get_seq_length())

    def save_at(end: int) -> None:
        if args.save_cache and end == kept:
            cache.save(args.save_cache, ids[:, :end].cpu())

    with attend(model), LayerProgress(model, f"prefill of {ids.shape[1]:,} tokens", len(ends)) as progress:

        def ready() -> None:
            progress.close()
            save_at(ids.shape[1])  # a prompt with nothing after it is complete only now

        for end in ends if args.max_new_tokens == 0 else ends[:-1]:
            _forward(model, cache, ids[:, cache.get_seq_length() : end])
            save_at(end)
        if args.max_new_tokens:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.max_new_tokens,
                streamer=_Stream(tokenizer, ready),
                **cache_argument(cache),
                **_sampling(args, model),
            )


@torch.no_grad()
def _forward(model: Any, cache: MomentCache, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache_argument(cache)).logits[:, -1]
