"""The constant-size summary of the evicted tokens of each KV head: count, means and centred scatter matrices."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from momentkv.state import accumulate_dtype


@dataclass(frozen=True)
class Moments:
    """Centred moments of a token set, one set per leading index (docs/math.md, Eqs. 5-7).

    count: number of tokens `n_e`, `[b, h]`.
    mean_k, mean_v: mean key `[b, h, d]` and mean value `[b, h, d_v]`.
    scatter_vk: `sum (v - v_mean)(k - k_mean)^T`, `[b, h, d_v, d]`; None when only the zeroth order is kept.
    scatter_kk: `sum (k - k_mean)(k - k_mean)^T`, `[b, h, d, d]`; None unless the variance mass is used.

    Every operation is pure. An empty set has count 0 and zeros everywhere.
    """

    count: Float[Tensor, "b h"]
    mean_k: Float[Tensor, "b h d"]
    mean_v: Float[Tensor, "b h dv"]
    scatter_vk: Float[Tensor, "b h dv d"] | None = None
    scatter_kk: Float[Tensor, "b h d d"] | None = None

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor, *, first_order: bool = True, variance: bool = False) -> "Moments":
        """The summary of no tokens, shaped for keys `[b, h, n, d]` and values `[b, h, n, d_v]`."""
        none = slice(0, 0)
        return cls.of(keys[:, :, none], values[:, :, none], first_order=first_order, variance=variance)

    @classmethod
    def of(
        cls,
        keys: Float[Tensor, "b h n d"],
        values: Float[Tensor, "b h n dv"],
        weight: Float[Tensor, "b h n"] | Bool[Tensor, "b h n"] | None = None,
        *,
        first_order: bool = True,
        variance: bool = False,
    ) -> "Moments":
        """Moments of the given tokens, accumulated in fp32 (fp64 for fp64 input).

        Args:
            keys, values: the tokens.
            weight: 1 or True for a token that counts, 0 or False for one that does not; None counts all.
            first_order, variance: which scatter matrices to keep.
        """
        dtype = accumulate_dtype(keys)
        k, v = keys.to(dtype), values.to(dtype)
        w = torch.ones(k.shape[:-1], dtype=dtype, device=k.device) if weight is None else weight.to(dtype)
        count = w.sum(-1)
        share = (w / count.clamp(min=1).unsqueeze(-1)).unsqueeze(-1)
        mean_k, mean_v = (share * k).sum(-2), (share * v).sum(-2)
        dk, dv = k - mean_k.unsqueeze(-2), v - mean_v.unsqueeze(-2)
        weighted = (w.unsqueeze(-1) * dk).transpose(-1, -2)
        return cls(
            count,
            mean_k,
            mean_v,
            (weighted @ dv).transpose(-1, -2) if first_order else None,
            weighted @ dk if variance else None,
        )

    @classmethod
    def single(
        cls, key: Float[Tensor, "b h d"], value: Float[Tensor, "b h dv"], weight: Bool[Tensor, "b h"]
    ) -> "Moments":
        """One token per head, where `weight` is True: its scatter is zero and is left out."""
        dtype = accumulate_dtype(key)
        return cls(weight.to(dtype), key.to(dtype), value.to(dtype))

    def merge(self, other: "Moments") -> "Moments":
        """Moments of the union of two disjoint sets: the parallel formula (Eq. 7), exact and order-free.

        The result keeps the scatter matrices that `self` keeps; one that `other` lacks counts as zero.
        """
        return self._combine(other, 1)

    def subtract(self, other: "Moments") -> "Moments":
        """Moments of the set without a subset of it: Eq. 7 with negative counts.

        Exact algebra, but fp32 keeps only what is left: going from 20,000 tokens down to 20 leaves an error of per
        cents in the scatter. Removing everything gives the empty set.
        """
        return self._combine(other, -1)

    def _combine(self, other: "Moments", sign: int) -> "Moments":
        n1, n2 = self.count, sign * other.count
        n = n1 + n2
        left = (n > 0).to(n.dtype)  # nothing left: everything is zero, means too
        share = left * n2 / n.clamp(min=1)
        dk, dv = other.mean_k - self.mean_k, other.mean_v - self.mean_v
        kept, cross = left[..., None, None], (n1 * share)[..., None, None]

        def scatter(x: Tensor | None, y: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor | None:
            if x is None:
                return None
            both = x if y is None else x + sign * y
            return kept * both + (cross * rows.unsqueeze(-1)) * columns.unsqueeze(-2)

        return replace(
            self,
            count=left * n,
            mean_k=left.unsqueeze(-1) * self.mean_k + share.unsqueeze(-1) * dk,
            mean_v=left.unsqueeze(-1) * self.mean_v + share.unsqueeze(-1) * dv,
            scatter_vk=scatter(self.scatter_vk, other.scatter_vk, dv, dk),
            scatter_kk=scatter(self.scatter_kk, other.scatter_kk, dk, dk),
        )

    def inverse_count(self) -> Float[Tensor, "b h"]:
        """`1 / n_e`, and 0 for the empty set."""
        return torch.where(self.count > 0, 1 / self.count.clamp(min=1), torch.zeros_like(self.count))

    def residual(
        self,
        keys: Float[Tensor, "b h n d"],
        values: Float[Tensor, "b h n dv"],
        scaling: float,
        centred: bool = True,
    ) -> Float[Tensor, "b h n"]:
        """Norm of what the summary does not say about each token (Eq. 11); `|v|` itself for the empty set.

        Args:
            scaling: the model's softmax scale, `1/sqrt(d)` in the paper.
            centred: False evaluates the affine model at `k` instead of `k - k_mean`, as the paper's own text has it.
        """
        dtype = self.mean_k.dtype
        k, v = keys.to(dtype), values.to(dtype)
        r = v - self.mean_v.unsqueeze(-2)
        if self.scatter_vk is not None:
            slope = self.scatter_vk * (scaling * self.inverse_count())[..., None, None]
            r = r - (k - self.mean_k.unsqueeze(-2) if centred else k) @ slope.transpose(-1, -2)
        return torch.linalg.vector_norm(r, dim=-1)


def to_raw_sums(m: Moments, dtype: torch.dtype, scatters: Collection[str] | None = None) -> dict[str, Tensor]:
    """The paper's sufficient statistics (Eq. 5), rounded to `dtype`: the reference mode, not the default.

    Half precision is lossy here on real models: fp16 overflows at 65504 and bf16 keeps 8 bits of a large sum.

    Args:
        scatters: which of "scatter_vk" and "scatter_kk" to give, zero where `m` lacks one; None: those that `m` keeps.
    """
    sums = {"count": m.count, "mean_k": m.count.unsqueeze(-1) * m.mean_k, "mean_v": m.count.unsqueeze(-1) * m.mean_v}
    for name, scatter, left in (("scatter_vk", m.scatter_vk, m.mean_v), ("scatter_kk", m.scatter_kk, m.mean_k)):
        if scatter is not None or name in (scatters or ()):
            of_means = m.count[..., None, None] * left.unsqueeze(-1) * m.mean_k.unsqueeze(-2)
            sums[name] = of_means if scatter is None else scatter + of_means
    return {name: x if name == "count" else x.to(dtype) for name, x in sums.items()}


def from_raw_sums(sums: dict[str, Tensor], clamp: float = 1e-6) -> Moments:
    """Centred moments recovered from raw sums (Eq. 6) in fp32; entries of the scatter below `clamp` become 0."""
    count = sums["count"]
    inverse = torch.where(count > 0, 1 / count.clamp(min=1), torch.zeros_like(count)).unsqueeze(-1)
    sum_k, sum_v = sums["mean_k"].to(count.dtype), sums["mean_v"].to(count.dtype)

    def scatter(name: str, left: Tensor) -> Tensor | None:
        if name not in sums:
            return None
        centred = sums[name].to(count.dtype) - left.unsqueeze(-1) * (inverse * sum_k).unsqueeze(-2)
        return torch.where(centred.abs() < clamp, torch.zeros_like(centred), centred)

    return Moments(count, inverse * sum_k, inverse * sum_v, scatter("scatter_vk", sum_v), scatter("scatter_kk", sum_k))
