"""The plane that holds most of the spread of a set of vectors: its first two principal components."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Plane:
    """mean: `[d]`. axes: two orthonormal rows `[2, d]`, the larger spread first. explained: share of the total
    variance along each, `[2]`, 0 where the vectors have no spread."""

    mean: Float[Tensor, " d"]
    axes: Float[Tensor, "2 d"]
    explained: Float[Tensor, "2"]

    def __call__(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n 2"]:
        """Coordinates in the plane, from the mean of the vectors."""
        return (x - self.mean) @ self.axes.T


def principal_plane(x: Float[Tensor, "n d"]) -> Plane:
    """The plane of `n` vectors of at least two dimensions, in fp64.

    An axis has no direction of its own: its largest entry is made positive, so that a repeated run draws the same.
    """
    if x.shape[-1] < 2 or x.shape[0] < 1:
        raise ValueError(f"a plane needs vectors of at least two dimensions, not {list(x.shape)}")
    x = x.double()
    mean = x.mean(0)
    variances, vectors = torch.linalg.eigh((x - mean).T @ (x - mean))  # ascending
    axes = vectors[:, [-1, -2]].T
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    variances = variances.clamp(min=0)
    return Plane(mean, axes, variances[[-1, -2]] / variances.sum().clamp(min=torch.finfo(x.dtype).tiny))
