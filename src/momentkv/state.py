"""Attention states: what one query needs to know about a set of tokens, and how states of disjoint sets merge."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

QUERY_BLOCK_ELEMENTS = 1 << 24  # logits held at once by `attend`: 64 MiB in fp32


class AttnState(NamedTuple):
    """The attention of queries over one set of tokens (docs/math.md, section 1).

    out: softmax-weighted mean of the values, `[..., d_v]`, zero for the empty set.
    lse: log of the softmax normaliser, `[...]`, `-inf` for the empty set.
    """

    out: Float[Tensor, "*q dv"]
    lse: Float[Tensor, "*q"]


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """fp32 for every 16-bit and 32-bit input, fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def scaled(query: Tensor, scaling: float) -> Tensor:
    """The query times the softmax scale: `a . k` is the logit. In the query's dtype only where that is exact."""
    exact = math.frexp(scaling)[0] == 0.5  # a power of two changes no mantissa
    return (query if exact else query.to(accumulate_dtype(query))) * scaling


def empty_like(state: AttnState) -> AttnState:
    """The state of the empty set: the neutral element of `merge`."""
    return AttnState(torch.zeros_like(state.out), torch.full_like(state.lse, -torch.inf))


def merge(x: AttnState, y: AttnState) -> AttnState:
    """The state of the union of two disjoint sets (Eq. 1). Associative, commutative, exact.

    Args:
        x, y: states of the same shape; either or both may be empty.
    """
    top = torch.maximum(x.lse, y.lse)
    top = torch.where(top == -torch.inf, 0.0, top)  # both empty: exp(-inf - 0) = 0, not NaN
    weight_x, weight_y = torch.exp(x.lse - top), torch.exp(y.lse - top)
    total = weight_x + weight_y
    share = (weight_x / torch.where(total > 0, total, 1.0)).unsqueeze(-1)
    rest = (weight_y / torch.where(total > 0, total, 1.0)).unsqueeze(-1)
    return AttnState(share * x.out + rest * y.out, top + torch.log(total))


def per_head_product(x: Float[Tensor, "b h g q m"], y: Float[Tensor, "b h m n"]) -> Float[Tensor, "b h g q n"]:
    """Every query head of a group against its KV head's matrix: one batched product, nothing repeated."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def attend_logits(logits: Float[Tensor, "b h g q n"], values: Float[Tensor, "b h n dv"]) -> AttnState:
    """The state of tokens given their logits, `-inf` for those that are not attended to (Eq. 1)."""
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.softmax(logits, dim=-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    return AttnState(per_head_product(weights, values), lse)


def _attend_block(a: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> AttnState:
    logits = per_head_product(a, keys.transpose(-1, -2))
    return attend_logits(logits if mask is None else logits.masked_fill(~mask, -torch.inf), values)


def attend(
    a: Float[Tensor, "b h g q d"],
    keys: Float[Tensor, "b h n d"],
    values: Float[Tensor, "b h n dv"],
    mask: Bool[Tensor, "#b #h #g #q n"] | None = None,
) -> AttnState:
    """The exact state of `a` over the tokens that `mask` allows (Eq. 1); queries go in blocks of bounded memory.

    Args:
        a: scaled queries, so that `a . k` is the logit.
        keys, values: tokens of each KV head, any floating dtype; the result is fp32 (fp64 for fp64 input).
        mask: True where a token is attended to; None attends to all. A fully masked query gives the empty state.
    """
    dtype = accumulate_dtype(a)
    a, keys, values = a.to(dtype), keys.to(dtype), values.to(dtype)
    batch, heads, groups, queries, _ = a.shape
    block = max(1, QUERY_BLOCK_ELEMENTS // max(1, batch * heads * groups * keys.shape[2]))
    if queries <= block:
        return _attend_block(a, keys, values, mask)
    states = []
    for start in range(0, queries, block):
        rows = slice(start, start + block)
        part = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        states.append(_attend_block(a[..., rows, :], keys, values, part))
    return AttnState(torch.cat([s.out for s in states], dim=-2), torch.cat([s.lse for s in states], dim=-1))
