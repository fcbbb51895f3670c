"""Error of a layer's attention output after compression, on the model's own later queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from momentkv import store
from momentkv.correction import estimate
from momentkv.layer import LayerState
from momentkv.policies.base import Evidence
from momentkv.settings import Settings
from momentkv.state import AttnState, attend, merge


@dataclass(frozen=True)
class OutputError:
    """Relative errors `|estimate - f| / |f|` of one layer, for one row.

    plain, corrected: of each query head and query, `[h, g, q]`: with the same exact tokens, without and with the
    correction. projected: the corrected one after the head's part of the output projection, `[h, g, q]`; joint: of the
    layer's whole output, `[q]`; both None where the model has no output projection of its own.
    """

    plain: Tensor
    corrected: Tensor
    projected: Tensor | None
    joint: Tensor | None


def exact_output(e: Evidence) -> AttnState:
    """The full attention of the evidence's queries, each over all tokens up to its own position."""
    causal = e.positions.unsqueeze(2) <= e.query_positions[:, None, :, None]
    return attend(e.queries, e.keys, e.values, (causal & e.valid.unsqueeze(2)).unsqueeze(2))


def _retained(state: LayerState, e: Evidence, prompt: int) -> AttnState:
    """Attention over what the state holds of the prompt and all that follows it."""
    keys = torch.cat([state.dense(state.keys), e.keys[:, :, prompt:]], dim=2)
    values = torch.cat([state.dense(state.values), e.values[:, :, prompt:]], dim=2)
    positions = torch.cat([state.dense(state.positions), e.positions[:, :, prompt:]], dim=2)
    seen = (positions != store.FREE).unsqueeze(2) & (positions.unsqueeze(2) <= e.query_positions[:, None, :, None])
    return attend(e.queries, keys, values, seen.unsqueeze(2))


def _relative(x: Tensor, truth: Tensor) -> Tensor:
    return (x - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-30)


@torch.no_grad()
def output_error(
    state: LayerState, settings: Settings, e: Evidence, full: AttnState, prompt: int, projection: Tensor | None
) -> OutputError:
    """Attend with the queries after the prompt, as if nothing more were evicted.

    Args:
        state: the prompt, compressed. e: prompt and continuation, with the queries of the continuation.
        full: `exact_output(e)`. prompt: tokens of the prompt. projection: weight `[hidden, heads * d_v]`, or None.
    """
    kept = _retained(state, e, prompt)
    repaired = kept
    if settings.correction != "off":
        repaired = merge(kept, estimate(e.queries, state.moments(settings), settings.correction, settings.mass))
    projected = joint = None
    if projection is not None:
        f, g = (x.out[0].flatten(0, 1).to(projection.dtype) for x in (full, repaired))  # [heads, q, d_v]
        parts = projection.unflatten(1, (f.shape[0], -1)).permute(1, 2, 0)  # [heads, d_v, hidden]
        truth, lost = f @ parts, (g - f) @ parts
        projected = (lost.norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-30)).unflatten(0, kept.lse.shape[1:3])
        joint = lost.sum(0).norm(dim=-1) / truth.sum(0).norm(dim=-1).clamp(min=1e-30)
    return OutputError(_relative(kept.out, full.out)[0], _relative(repaired.out, full.out)[0], projected, joint)
