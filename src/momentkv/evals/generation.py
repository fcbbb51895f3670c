"""Greedy answers of many caches at once, as rows of one batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.compat import cache_argument
from momentkv.hf.rows import RowsCache


def step(model: Any, rows: RowsCache, token_ids: Tensor) -> Tensor:
    """Logits after the last of `token_ids` `[b, n]`, `[b, vocabulary]`."""
    return model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **cache_argument(rows)).logits[:, -1]


def _first(logits: Tensor, forbidden: set[int]) -> Tensor:
    if forbidden:
        logits = logits.clone()
        logits[:, sorted(t for t in forbidden if t < logits.shape[-1])] = -torch.inf
    return logits.argmax(-1)


@torch.no_grad()
def answer(
    model: Any,
    caches: list[MomentCache],
    logits: Tensor,
    question: list[int],
    max_new_tokens: int,
    stops: set[int],
    not_first: set[int],
    done: Callable[[int, list[int]], None],
) -> None:
    """Continue every cache greedily; rows that have ended leave the batch. The caches are used up.

    Args:
        logits: after the prompt, `[1, vocabulary]`. question: tokens to read first, may be empty.
        stops: tokens that end an answer. not_first: those that may not be its first.
        done: called with the index of a cache and its answer's tokens (without the stop) as soon as it has ended.
    """
    rows = RowsCache(caches)
    answers: list[list[int]] = [[] for _ in caches]
    with attend(model):
        if question:
            ids = torch.tensor([question], device=logits.device).expand(len(caches), -1)
            logits = step(model, rows, ids)
        else:
            logits = logits.expand(len(caches), -1)
        new = _first(logits, not_first)
        while True:
            alive = []
            for row, token in enumerate(new.tolist()):
                mine = answers[rows.order[row]]
                if token not in stops:
                    mine.append(token)
                if token in stops or len(mine) == max_new_tokens:
                    done(rows.order[row], mine)
                else:
                    alive.append(row)
            if not alive:
                return
            if len(alive) < len(new):
                index = torch.tensor(alive, device=new.device)
                rows.select(index)
                new = new[index]
            new = step(model, rows, new.unsqueeze(-1)).argmax(-1)
