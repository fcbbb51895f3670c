"""TOVA (Oren et al., 2024, arXiv 2401.06104): attention of the last query, averaged over all heads."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from momentkv.policies.base import Evidence, Policy, attention_weights


@dataclass(frozen=True)
class Tova(Policy):
    """One score per token for the whole layer; per head where heads hold different tokens (adaptive budgets)."""

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        e = evidence
        last = attention_weights(e.queries[..., -1:, :], e.query_positions[:, -1:], e.keys, e.positions, e.valid)
        per_head = last.squeeze(3).mean(2)
        return per_head.mean(1, keepdim=True).expand_as(per_head) if e.aligned else per_head
