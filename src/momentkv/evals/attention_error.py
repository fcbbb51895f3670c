"""Error of the attention output, per head and query, with and without a correction, on a real model's own queries."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from momentkv.compress import compress
from momentkv.correction import estimate
from momentkv.layer import LayerState
from momentkv.policies.base import Evidence
from momentkv.settings import Settings
from momentkv.state import AttnState, attend, empty_like, merge


@dataclass(frozen=True)
class AttentionError:
    """For one layer, all `[b, h, g, q]`: relative errors and the quantities of docs/math.md, section 2.

    plain, corrected: `|estimate - f| / |f|` with eviction alone and with the correction of the settings.
    evicted_weight: `w_E`. cosine: between `f_E` and `f_R`. cosine_estimate: between `f_E` and its estimate.
    """

    plain: Tensor
    corrected: Tensor
    evicted_weight: Tensor
    cosine: Tensor
    cosine_estimate: Tensor


def split_evidence(e: Evidence, prompt: int) -> tuple[Evidence, Evidence]:
    """Evidence of a text as that of its first `prompt` tokens, and the whole with only the later queries.

    Args:
        e: evidence of one unpadded row whose recorded queries reach back before position `prompt`.
    """
    before = e.query_positions[0] < prompt
    head = replace(
        e,
        keys=e.keys[:, :, :prompt],
        values=e.values[:, :, :prompt],
        positions=e.positions[..., :prompt],
        valid=e.valid[..., :prompt],
        queries=e.queries[..., before, :],
        query_positions=e.query_positions[:, before],
        mass=None,
    )
    return head, replace(e, queries=e.queries[..., ~before, :], query_positions=e.query_positions[:, ~before])


def kept_mask(state: LayerState, tokens: int) -> Tensor:
    """Which of the first `tokens` positions a state retains, `[b, h, tokens]`."""
    positions = state.dense(state.positions).long()
    mask = torch.zeros(*positions.shape[:2], tokens + 1, dtype=torch.bool, device=positions.device)
    return mask.scatter_(2, torch.where(positions < 0, tokens, positions), True)[..., :tokens]


def _exact(e: Evidence, among: Tensor) -> AttnState:
    causal = e.positions.unsqueeze(2) <= e.query_positions[:, None, :, None]
    return attend(e.queries, e.keys, e.values, (among.unsqueeze(2) & causal).unsqueeze(2))


def _relative(x: Tensor, truth: Tensor) -> Tensor:
    return (x - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-30)


@torch.no_grad()
def attention_error(e: Evidence, prompt: int, settings: Settings, budget: int) -> AttentionError:
    """Compress the first `prompt` tokens to `budget` per head and attend with the queries that follow.

    Later tokens are retained by all variants, so that only the loss of the evicted prompt is measured.

    Args:
        e: see `split_evidence`. settings: the method; with `correction="off"` both errors are the same.
    """
    head, rest = split_evidence(e, prompt)
    seen = torch.full((e.keys.shape[0],), prompt, dtype=torch.int32, device=e.keys.device)
    state = compress(head, settings, torch.full_like(seen, budget).long(), seen)
    retained = rest.valid.clone()
    retained[..., :prompt] &= kept_mask(state, prompt)
    full = _exact(rest, rest.valid)
    kept, lost = _exact(rest, retained), _exact(rest, rest.valid & ~retained)
    if settings.correction == "off":
        estimated = empty_like(lost)
    else:
        estimated = estimate(rest.queries, state.moments(settings), settings.correction, settings.mass)
    cosine = torch.nn.functional.cosine_similarity
    return AttentionError(
        plain=_relative(kept.out, full.out),
        corrected=_relative(merge(kept, estimated).out, full.out),
        evicted_weight=torch.exp(lost.lse - full.lse),
        cosine=cosine(lost.out, kept.out, dim=-1),
        cosine_estimate=cosine(lost.out, estimated.out, dim=-1),
    )
