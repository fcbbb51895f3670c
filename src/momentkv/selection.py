"""From scores to a keep-mask: protected tokens, head budgets, blocks of adjacent tokens."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F


def protected(
    positions: Int[Tensor, "b h n"],
    valid: Bool[Tensor, "b h n"],
    seen: Int[Tensor, " b"],
    sinks: int,
    window: int | Int[Tensor, " b"],
) -> Bool[Tensor, "b h n"]:
    """Tokens that are kept whatever they score: the first `sinks` and the last `window` of each row.

    Args:
        positions: position of each token in its own row, counted without padding.
        seen: tokens of each row so far, the newest included.
    """
    recent = (seen - window).view(-1, 1, 1)
    return valid & ((positions < sinks) | (positions >= recent))


def ranks(scores: Float[Tensor, "*b n"], eligible: Bool[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """Rank of each eligible token, 0 for the best; ties go to the earlier token, the rest rank behind."""
    finite = scores.clamp(min=torch.finfo(scores.dtype).min)  # so that no score ties with a token that may not compete
    order = finite.masked_fill(~eligible, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def _blocks(x: Tensor, block: int, fill: float | bool) -> Tensor:
    short = -x.shape[-1] % block
    return F.pad(x, (0, short), value=fill).unflatten(-1, (-1, block))


def block_means(scores: Float[Tensor, "b h n"], eligible: Bool[Tensor, "b h n"], block: int) -> Float[Tensor, "b h n"]:
    """Mean score of the eligible tokens of each aligned block of adjacent candidates, given back to each of them."""
    if block == 1:
        return scores
    ok = _blocks(eligible, block, False)
    total = (_blocks(scores, block, 0.0).masked_fill(~ok, 0.0)).sum(-1, keepdim=True)
    mean = total / ok.sum(-1, keepdim=True).clamp(min=1)
    return mean.expand_as(ok).flatten(-2)[..., : scores.shape[-1]]


def _fitting_blocks(
    means: Float[Tensor, "b h n"], eligible: Bool[Tensor, "b h n"], room: Int[Tensor, "b h"], block: int
) -> Bool[Tensor, "b h n"]:
    """Whole blocks in order of their score, for as long as they fit into `room`."""
    ok = _blocks(eligible, block, False)
    size = ok.sum(-1)
    head_of_block = ok.to(torch.uint8).argmax(-1)
    score = _blocks(means, block, 0.0).gather(-1, head_of_block.unsqueeze(-1)).squeeze(-1)
    order = score.masked_fill(size == 0, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    filled = size.gather(-1, order).cumsum(-1)
    fits = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, filled <= room.unsqueeze(-1))
    return (fits.unsqueeze(-1) & ok).flatten(-2)[..., : means.shape[-1]]


def keep_mask(
    scores: Float[Tensor, "b h n"],
    valid: Bool[Tensor, "b h n"],
    shield: Bool[Tensor, "b h n"],
    budget: Int[Tensor, "b h"],
    block: int = 1,
) -> Bool[Tensor, "b h n"]:
    """The `budget` tokens of each head to keep: shielded ones first, then the best by score.

    Args:
        scores: one per token, higher is better. valid: real tokens. shield: kept by mask, not by score.
        budget: tokens per head, shielded ones included; a head with fewer valid tokens keeps them all.
        block: adjacent candidates are judged by their block's mean score and kept as whole blocks while these fit;
            what is left of the budget goes to the best single tokens.
    """
    shield = shield & valid
    room = (budget - shield.sum(-1)).clamp(min=0)
    eligible = valid & ~shield
    if block == 1:
        return shield | (eligible & (ranks(scores, eligible) < room.unsqueeze(-1)))
    chosen = _fitting_blocks(block_means(scores, eligible, block), eligible, room, block)
    rest = eligible & ~chosen
    left = (room - chosen.sum(-1)).unsqueeze(-1)
    return shield | chosen | (rest & (ranks(scores, rest) < left))
