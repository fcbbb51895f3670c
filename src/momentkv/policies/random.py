"""Random eviction: the anchor every table should show."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from momentkv.policies.base import Evidence, Policy
from momentkv.state import accumulate_dtype

_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class Random(Policy):
    """A hash of (seed, layer, head, position): uniform, reproducible, and the same for a row in any batch.

    seed: any integer, default 0.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r}: must be a whole number")

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        heads = torch.arange(evidence.positions.shape[1], device=evidence.positions.device).view(1, -1, 1)
        x = evidence.positions.long() + (heads << 20) + (evidence.layer << 26) + self.seed * 0x9E3779B1
        for multiplier in (0x7FEB352D, 0x846CA68B):  # two rounds of a 32-bit mixing function
            x = x & _MASK
            x = ((x ^ (x >> 16)) * multiplier) & _MASK
            x = x ^ (x >> 15)
        return x.to(accumulate_dtype(evidence.keys))
