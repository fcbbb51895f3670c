"""How moments are stored: centred fp32 by default, or the paper's raw half-precision sums as a reference mode."""

import torch
from torch import Tensor

from momentkv.moments import Moments, from_raw_sums, to_raw_sums
from momentkv.settings import Settings

Shape = tuple[int, ...]
FIELDS = ("count", "mean_k", "mean_v", "scatter_vk", "scatter_kk")


def storage_dtype(settings: Settings) -> torch.dtype:
    """fp32 for centred moments, the dtype named by `moments="raw-..."` otherwise."""
    return getattr(torch, settings.moments.removeprefix("raw-")) if settings.moments != "centred" else torch.float32


def summary_spec(settings: Settings, heads: int, d: int, dv: int) -> dict[str, tuple[Shape, torch.dtype]]:
    """Shape (without batch) and dtype of each stored tensor; empty when the settings keep no moments."""
    if not settings.keeps_moments:
        return {}
    dtype = storage_dtype(settings)
    spec: dict[str, tuple[Shape, torch.dtype]] = {
        "count": ((heads,), torch.float32),  # a 16-bit count stops at 2048
        "mean_k": ((heads, d), dtype),
        "mean_v": ((heads, dv), dtype),
    }
    if settings.keeps_scatter:
        spec["scatter_vk"] = ((heads, dv, d), dtype)
    if settings.keeps_variance:
        spec["scatter_kk"] = ((heads, d, d), dtype)
    return spec


def moments_of(keys: Tensor, values: Tensor, weight: Tensor, settings: Settings) -> Moments:
    """Moments of the weighted tokens, with the scatter matrices that the settings keep."""
    return Moments.of(keys, values, weight, first_order=settings.keeps_scatter, variance=settings.keeps_variance)


def read(summary: dict[str, Tensor], settings: Settings) -> Moments:
    """The stored summary as centred moments."""
    return Moments(**summary) if settings.moments == "centred" else from_raw_sums(summary)


def absorb(summary: dict[str, Tensor], evicted: Moments, settings: Settings) -> dict[str, Tensor]:
    """The stored summary after the evicted tokens have joined it."""
    if settings.moments == "centred":
        merged = read(summary, settings).merge(evicted)
        return {name: getattr(merged, name) for name in summary}
    added = to_raw_sums(evicted, torch.float32, summary)
    return {name: (x.float() + added[name]).to(x.dtype) for name, x in summary.items()}


def no_moments(keys: Tensor, values: Tensor) -> Moments:
    """Zeroth-order moments of the empty set, shaped for the given tokens: for settings that keep no summary."""
    return Moments.empty(keys, values, first_order=False)
