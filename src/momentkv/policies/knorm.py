"""Knorm (Devoto et al., 2024, arXiv 2406.11430): keys of small norm attract attention."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from momentkv.policies.base import Evidence, Policy
from momentkv.state import accumulate_dtype


@dataclass(frozen=True)
class Knorm(Policy):
    """Minus the norm of the key."""

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        return -torch.linalg.vector_norm(evidence.keys.to(accumulate_dtype(evidence.keys)), dim=-1)
