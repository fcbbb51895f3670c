"""TOVA (Oren et al., 2024, arXiv 2401.06104): attention of the last query, averaged over all heads."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from momentkv.policies.base import Evidence, Policy, window_attention


@dataclass(frozen=True)
class Tova(Policy):
    """One score per token for the whole layer; per head where heads hold different tokens (adaptive budgets)."""

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        e = evidence
        last = replace(
            e,
            queries=e.queries[..., -1:, :],
            query_positions=e.query_positions[:, -1:],
            logits=None if e.logits is None else e.logits[..., -1:, :],
        )
        per_head = window_attention(last)
        return per_head.mean(1, keepdim=True).expand_as(per_head) if e.aligned else per_head
