"""What an eviction policy sees (`Evidence`) and what it must say (`score`)."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from momentkv.moments import Moments
from momentkv.state import accumulate_dtype, per_head_product

# elements; queries are taken in blocks so that no step holds more; on a CPU the block should stay in its cache
LOGITS_AT_ONCE = {"cpu": 1 << 21}


@dataclass(frozen=True)
class Evidence:
    """Everything a policy may look at, for one layer. Nothing here belongs to a model.

    keys, values: the candidates, `[b, h, n, d]` and `[b, h, n, d_v]`, in order of position.
    positions: `[b, h, n]`, counted per row without padding. valid: `[b, h, n]`, False in empty places.
    queries: the observation window, scaled, `[b, h, g, w, d]`; one query while decoding.
    query_positions: `[b, w]`, -1 where a row has fewer than `w` queries.
    moments: of the tokens evicted so far. scaling: the model's softmax scale.
    mass: attention each token received from all queries so far, `[b, h, n]`; only for policies with `needs_mass`.
    decoding: True for a decode step, where neighbours in the candidate list are not neighbours in the text.
    logits: of the queries over the candidates, `[b, h, g, w, n]`, `-inf` where a query may not look; None when they
        are still to be computed.
    layer: index of the layer. aligned: every head holds the same tokens at the same places.
    """

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n dv"]
    positions: Int[Tensor, "b h n"]
    valid: Bool[Tensor, "b h n"]
    queries: Float[Tensor, "b h g w d"]
    query_positions: Int[Tensor, "b w"]
    moments: Moments
    scaling: float
    mass: Float[Tensor, "b h n"] | None = None
    logits: Float[Tensor, "b h g w n"] | None = None
    decoding: bool = False
    layer: int = 0
    aligned: bool = True


def one_of(name: str, value: object, valid: Iterable[object]) -> None:
    """Raise a ValueError that quotes `value` and names what is valid."""
    if value not in tuple(valid):
        raise ValueError(f"{name}={value!r} is not known; valid: {', '.join(map(str, valid))}")


class Policy(ABC):
    """A score per token. Subclasses are final: to vary one, wrap it or write another file."""

    needs_mass: ClassVar[bool] = False

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Names of the policy's own fields."""
        return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()

    @abstractmethod
    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        """How much each token is worth keeping; the lowest are evicted first. Values at invalid places are ignored."""


def attention_weights(
    queries: Float[Tensor, "b h g w d"],
    query_positions: Int[Tensor, "b w"],
    keys: Float[Tensor, "b h n d"],
    positions: Int[Tensor, "b h n"],
    valid: Bool[Tensor, "b h n"],
) -> Float[Tensor, "b h g w n"]:
    """Causal softmax attention of the queries over the candidates; a query at position -1 gives zeros."""
    dtype = accumulate_dtype(queries)
    logits = per_head_product(queries.to(dtype), keys.to(dtype).transpose(-1, -2))
    seen = valid.unsqueeze(2) & (positions.unsqueeze(2) <= query_positions[:, None, :, None])
    logits = logits.masked_fill(~seen.unsqueeze(2), -torch.inf)
    return torch.nan_to_num(torch.softmax(logits, dim=-1), nan=0.0)  # a row without any key is NaN


def received_attention(
    queries: Float[Tensor, "b h g w d"],
    query_positions: Int[Tensor, "b w"],
    keys: Float[Tensor, "b h n d"],
    positions: Int[Tensor, "b h n"],
    valid: Bool[Tensor, "b h n"],
) -> Float[Tensor, "b h n"]:
    """Causal attention per token, summed over the queries and averaged over the group, in bounded memory.

    The tokens must be in order of position and end with those of the queries, as `candidates` has them: then no query
    sees more than the first `n - w + i + 1` columns, and nothing is computed for the others.
    """
    dtype = accumulate_dtype(queries)
    total = torch.zeros(valid.shape, dtype=dtype, device=keys.device)
    batch, heads, groups, count, _ = queries.shape
    turned = keys.to(dtype).transpose(-1, -2)
    block = max(1, LOGITS_AT_ONCE.get(keys.device.type, 1 << 26) // (batch * heads * groups * keys.shape[2]))
    for start in range(0, count, block):
        stop = min(start + block, count)
        last = keys.shape[2] - count + stop
        mine = query_positions[:, None, start:stop, None]
        seen = valid[:, :, None, :last] & (positions[:, :, None, :last] <= mine)
        logits = per_head_product(queries[..., start:stop, :].to(dtype), turned[..., :last])
        # not -inf: a query that sees nothing, at position -1, must have finite weights to be multiplied by 0
        weights = torch.softmax(logits.masked_fill_(~seen.unsqueeze(2), torch.finfo(dtype).min), dim=-1)
        share = (seen.any(-1).to(dtype) / groups).unsqueeze(2).expand(-1, -1, groups, -1)
        total[..., :last] += (share.reshape(batch, heads, 1, -1) @ weights.flatten(2, 3)).squeeze(2)
    return total


def window_attention(evidence: Evidence) -> Float[Tensor, "b h n"]:
    """Attention of the observation window: summed over its queries, mean over the group's query heads."""
    e = evidence
    if e.logits is not None:
        return torch.softmax(e.logits, dim=-1).nan_to_num(0.0).sum(3).mean(2)
    return received_attention(e.queries, e.query_positions, e.keys, e.positions, e.valid)
