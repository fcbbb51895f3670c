"""KeyDiff (Park et al., 2025, arXiv 2504.15364): keys unlike the others are worth keeping."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from momentkv.policies.base import Evidence, Policy
from momentkv.state import accumulate_dtype


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Minus the cosine between a key and the mean of the normalised keys."""

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        k = F.normalize(evidence.keys.to(accumulate_dtype(evidence.keys)), dim=-1)
        k = k * evidence.valid.unsqueeze(-1)
        return -F.cosine_similarity(k, k.sum(-2, keepdim=True), dim=-1)
