"""Moment-informed eviction (MomentKV, arXiv 2606.01563, section 4.2): attention times moment residual."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from momentkv.policies.base import Evidence, Policy, one_of, window_attention


@dataclass(frozen=True)
class MomentResidual(Policy):
    """`alpha_j * |r_j|` (Eqs. 11-12): a token is safe to evict when it is unattended or the summary foretells it.

    residual: "centred" (default) or "uncentred", as the paper's own text prints it.
    """

    residual: Literal["centred", "uncentred"] = "centred"

    def __post_init__(self) -> None:
        one_of("residual", self.residual, ("centred", "uncentred"))

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        norm = evidence.moments.residual(
            evidence.keys, evidence.values, evidence.scaling, centred=self.residual == "centred"
        )
        return window_attention(evidence) * norm
