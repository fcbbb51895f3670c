"""The estimated attention state of the evicted tokens, in closed form from their moments."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from momentkv.moments import Moments
from momentkv.state import AttnState, per_head_product

ValueRule = Callable[[Tensor, Moments], Tensor]
MassRule = Callable[[Tensor, Moments], Tensor]


def zeroth_order(a: Float[Tensor, "b h g q d"], m: Moments) -> Float[Tensor, "b h g q dv"]:
    """`f_E ~ v_mean` (Eq. 9)."""
    return m.mean_v[:, :, None, None, :].expand(*a.shape[:-1], -1)


def first_order(a: Float[Tensor, "b h g q d"], m: Moments) -> Float[Tensor, "b h g q dv"]:
    """`f_E ~ v_mean + (S~ / n_e) a` (Eq. 8)."""
    if m.scatter_vk is None:
        raise ValueError("first order needs scatter_vk, which these moments do not keep")
    slope = m.scatter_vk * m.inverse_count()[..., None, None]
    return m.mean_v[:, :, None, None, :] + per_head_product(a, slope.transpose(-1, -2))


def jensen_mass(a: Float[Tensor, "b h g q d"], m: Moments) -> Float[Tensor, "b h g q"]:
    """`log Z_E ~ log n_e + a . k_mean` (Eq. 8): the paper's lower bound, `-inf` for the empty set."""
    return torch.log(m.count)[:, :, None, None] + per_head_product(a, m.mean_k.unsqueeze(-1)).squeeze(-1)


def variance_mass(a: Float[Tensor, "b h g q d"], m: Moments) -> Float[Tensor, "b h g q"]:
    """Jensen's mass plus `log(1 + var/2)` with `var = a^T Cov(k,k) a`: second order, growing only slowly."""
    if m.scatter_kk is None:
        raise ValueError("the variance mass needs scatter_kk, which these moments do not keep")
    covariance = m.scatter_kk * m.inverse_count()[..., None, None]
    variance = (per_head_product(a, covariance) * a).sum(-1).clamp(min=0)
    return jensen_mass(a, m) + torch.log1p(variance / 2)


VALUE_RULES: dict[str, ValueRule] = {"zeroth": zeroth_order, "first": first_order}
MASS_RULES: dict[str, MassRule] = {"jensen": jensen_mass, "variance": variance_mass}


def estimate(a: Float[Tensor, "b h g q d"], moments: Moments, order: str, mass: str) -> AttnState:
    """The estimated state of the evicted set for each query; empty where nothing was evicted (Eqs. 8-9).

    Args:
        a: scaled queries; every query head of a group is corrected with its own.
        moments: of the KV head's evicted tokens.
        order: "zeroth" or "first". mass: "jensen" or "variance".
    """
    a = a.to(moments.mean_k.dtype)
    return AttnState(VALUE_RULES[order](a, moments), MASS_RULES[mass](a, moments))
