"""SnapKV (Li et al., 2024, arXiv 2404.14469): pooled attention of an observation window."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from momentkv.policies.base import Evidence, Policy, one_of, window_attention


@dataclass(frozen=True)
class SnapKV(Policy):
    """Attention of the window's queries, summed, pooled along the text over the keys before the window.

    kernel: width of the pooling, odd, default 7; 1 pools nothing. pool: "avg" (default) or "max".
    While decoding the current query stands for the window and nothing is pooled.
    """

    kernel: int = 7
    pool: Literal["avg", "max"] = "avg"

    def __post_init__(self) -> None:
        one_of("pool", self.pool, ("avg", "max"))
        if not isinstance(self.kernel, int) or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel!r}: the pooling width must be a whole odd number")

    def score(self, evidence: Evidence) -> Float[Tensor, "b h n"]:
        attention = window_attention(evidence)
        if evidence.decoding or self.kernel == 1:
            return attention
        first = evidence.query_positions.masked_fill(evidence.query_positions < 0, 1 << 30).amin(-1)
        before = evidence.valid & (evidence.positions < first.view(-1, 1, 1))
        pool = F.avg_pool1d if self.pool == "avg" else F.max_pool1d
        pooled = pool(attention * before, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.masked_fill(~before, 0).where(before, attention)
