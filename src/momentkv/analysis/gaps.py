"""What eviction loses, in the paper's terms, and whether its identities hold (docs/math.md, section 2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from momentkv.state import AttnState

# Rounding units of the longest output below which a difference of outputs has no digits left to compare.
RESOLUTION = 1e6
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Gaps:
    """For each query, `[...]`, in the dtype of the states.

    weight: `w_E`, the share of attention that the evicted tokens would have had, from 0 to 1.
    cosine: between `f_E` and `f_R`. gamma: `|f_E - f_R| / |f|`. error: of plain eviction, `|f - f_R| / |f|`.
    parallel, across: the parts of the error along `f_R` (negative where `f_E` is shorter in its direction) and across
        it, both over `|f|`; the squares add up to that of `error`.

    Where nothing is evicted `f_E` is the zero vector: weight, error and both parts are 0, and so is the cosine.
    """

    weight: Tensor
    cosine: Tensor
    gamma: Tensor
    error: Tensor
    parallel: Tensor
    across: Tensor


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    return x / y.clamp(min=torch.finfo(y.dtype).tiny)


def _along_and_across(retained: Tensor, evicted: Tensor) -> tuple[Tensor, Tensor]:
    """`|f_E| cos(theta)` and `|f_E| sin(theta)`, the latter from the part of the vector itself: `1 - cos^2` would
    lose half of the digits."""
    unit = _ratio(retained, retained.norm(dim=-1, keepdim=True))
    along = (evicted * unit).sum(-1)
    return along, (evicted - along.unsqueeze(-1) * unit).norm(dim=-1)


def gaps_of(retained: AttnState, evicted: AttnState, full: AttnState) -> Gaps:
    """The quantities of Eqs. 2-4.

    Args:
        retained, evicted, full: exact states of the same queries over R, over E and over both.
    """
    length, weight = full.out.norm(dim=-1), torch.exp(evicted.lse - full.lse)
    along, across = _along_and_across(retained.out, evicted.out)
    return Gaps(
        weight=weight,
        cosine=_ratio(along, evicted.out.norm(dim=-1)),
        gamma=_ratio((evicted.out - retained.out).norm(dim=-1), length),
        error=_ratio((full.out - retained.out).norm(dim=-1), length),
        parallel=_ratio(weight * (along - retained.out.norm(dim=-1)), length),
        across=_ratio(weight * across, length),
    )


def residuals(retained: AttnState, evicted: AttnState, full: AttnState) -> Float[Tensor, "3 *q"]:
    """How far Eqs. 2, 3 and 4 are from holding, in this order, relative to the error `|f - f_R|` itself.

    The error is the difference of two outputs and no more exact than these. One below RESOLUTION rounding units of the
    longest output is taken as that much.
    """
    g = gaps_of(retained, evicted, full)
    lost = full.out - retained.out
    length = full.out.norm(dim=-1)
    longest = torch.stack([x.out.norm(dim=-1) for x in (retained, evicted, full)]).amax(0)
    floor = longest * RESOLUTION * torch.finfo(longest.dtype).eps
    scale = lost.norm(dim=-1).maximum(floor)
    difference = g.weight.unsqueeze(-1) * (evicted.out - retained.out)
    return torch.stack(
        [
            _ratio((lost - difference).norm(dim=-1), scale),
            _ratio((g.error**2 - g.parallel**2 - g.across**2).abs() * length**2, scale**2),
            _ratio((g.error - g.weight * g.gamma).abs() * length, scale),
        ]
    )


def check_identities(retained: AttnState, evicted: AttnState, full: AttnState, what: str) -> float:
    """The largest residual of Eqs. 2-4; they hold for any disjoint R and E that make up the whole.

    Args:
        what: where the states are from, for the message.

    Raises:
        FloatingPointError: one is above TOLERANCE or no number, so that the states are not what they are said to be.
    """
    largest = residuals(retained, evicted, full).flatten(1).amax(-1).tolist()
    for number, residual in zip((2, 3, 4), largest, strict=True):
        if not residual <= TOLERANCE:
            raise FloatingPointError(
                f"{what}: the identity ({number}) of docs/math.md does not hold, its relative residual is "
                f"{residual:.2g} and at most {TOLERANCE:g} is rounding"
            )
    return max(largest)
