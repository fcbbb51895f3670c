"""H2O (Zhang et al., 2023, arXiv 2306.14048): heavy hitters by attention accumulated over all queries."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from momentkv.policies.base import Evidence, Policy, one_of


@dataclass(frozen=True)
class H2O(Policy):
    """Accumulated attention, per KV head, over prefill and decoding alike.

    mean: divide by the number of queries that could see the token (kvpress's variant); False is the paper's sum,
        which favours early tokens.
    """

    needs_mass = True
    mean: bool = False

    def __post_init__(self) -> None:
        one_of("mean", self.mean, (True, False))

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        if evidence.mass is None:
            raise ValueError("h2o scores by accumulated attention, which this evidence does not carry")
        if not self.mean:
            return evidence.mass
        newest = evidence.query_positions.amax(-1).view(-1, 1, 1)
        return evidence.mass / (newest - evidence.positions + 1).clamp(min=1)
