"""StreamingLLM (Xiao et al., 2023, arXiv 2309.17453): sinks and the most recent tokens."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from momentkv.policies.base import Evidence, Policy


@dataclass(frozen=True)
class Streaming(Policy):
    """Later is better. Sinks are the selection's business. Original positions are kept, keys are not rotated again."""

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        return evidence.positions.to(evidence.moments.mean_k.dtype)
