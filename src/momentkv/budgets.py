"""Budgets: what a user may ask for, and how many tokens each layer and head gets."""

import re
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from momentkv.selection import ranks
from momentkv.settings import Settings

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
FORMS = 'tokens per head (128), a share of the prompt (0.1), bytes ("16MiB") or token-equivalents ("128te")'


@dataclass(frozen=True)
class Budget:
    """A parsed budget. kind: "tokens", "share", "bytes" (the whole cache) or "te" (per KV head)."""

    kind: Literal["tokens", "share", "bytes", "te"]
    amount: float

    @classmethod
    def parse(cls, value: "int | float | str | Budget") -> "Budget":
        """From an int (tokens), a float in (0, 1] (share), or a string of any of the four forms.

        Raises:
            ValueError: anything else, quoting it and naming the valid forms.
        """
        if isinstance(value, Budget):
            return value
        bad = ValueError(f"budget={value!r} is not a budget; valid: {FORMS}")
        if isinstance(value, bool):
            raise bad
        if isinstance(value, str):
            return cls._parse_text(value.strip(), bad)
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"budget={value!r}: at least 1 token per head")
            return cls("tokens", value)
        if isinstance(value, float) and 0 < value <= 1:
            return cls("share", value)
        raise bad

    @classmethod
    def _parse_text(cls, text: str, bad: ValueError) -> "Budget":
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
        if not match:
            raise bad
        number, unit = match.group(1), match.group(2).lower()
        if unit == "":
            return cls.parse(float(number) if "." in number else int(number))
        if unit not in UNITS and unit != "te":
            raise bad
        amount = float(number) * UNITS.get(unit, 1)
        if amount <= 0:
            raise bad
        return cls("te" if unit == "te" else "bytes", amount)

    def __str__(self) -> str:
        """Text that `parse` reads back as the same budget."""
        number = f"{self.amount:.15f}".rstrip("0")
        if self.kind == "share":
            return number + "0" if number.endswith(".") else number
        return number.rstrip(".") + {"tokens": "", "te": "te", "bytes": "B"}[self.kind]


def round_to_sum(x: Float[Tensor, "b m"]) -> Int[Tensor, "b m"]:
    """Round non-negative numbers to integers by largest remainder: each row's (integral) sum is conserved."""
    floor = torch.floor(x + 1e-9)
    missing = (x.sum(-1) - floor.sum(-1)).round().unsqueeze(-1)
    remainder = ((x - floor) * 2**20).round()  # equal ones must not be told apart by rounding noise
    remainder_rank = ranks(remainder, torch.ones_like(x, dtype=torch.bool))
    return (floor + (remainder_rank < missing)).long()


def even_shares(total: Int[Tensor, " b"], heads: int) -> Int[Tensor, "b h"]:
    """`total` in whole and nearly equal parts."""
    return round_to_sum((total.double() / heads).unsqueeze(-1).expand(-1, heads))


def pyramid(tokens: int, settings: Settings, layers: int, prompt: int | None = None) -> list[int]:
    """PyramidKV's budgets per layer (Cai et al., 2024, arXiv 2406.02069): a falling ramp with mean `tokens`.

    The last layer gets the window and a twentieth of the rest, but never less than the least budget; the first never
    more than `prompt` tokens. The sum is exactly `tokens * layers`.
    """
    low = max(settings.window + (tokens - settings.window) // 20, settings.least_budget)
    high = 2 * tokens - low
    if prompt is not None and prompt > tokens:
        high = min(high, prompt)
    low = 2 * tokens - high
    step = (high - low) / max(1, layers - 1)
    ramp = torch.tensor([[high - i * step for i in range(layers)] if layers > 1 else [tokens]], dtype=torch.float64)
    return round_to_sum(ramp)[0].tolist()


def adaptive(
    scores: Float[Tensor, "b h n"],
    eligible: Bool[Tensor, "b h n"],
    shielded: Int[Tensor, "b h"],
    total: Int[Tensor, " b"],
    settings: Settings,
) -> Int[Tensor, "b h"]:
    """Ada-KV's head budgets (Feng et al., 2024, arXiv 2407.11550): heads compete for the layer's tokens.

    A head's count is the number of its tokens among the layer's best; the budget mixes it with the uniform share
    (`alpha`), or has a share of it as a floor, in which the shielded tokens count, as in kvpress ("adaptive-floor").
    Sums over heads are exactly `total`.

    Args:
        scores: higher is better. eligible: tokens that compete. shielded: tokens each head keeps anyway.
        total: tokens that the heads of each row may keep together, shielded ones included.
    """
    heads, n = scores.shape[1:]
    room = (total - shielded.sum(-1)).clamp(min=0)
    uniform = room.unsqueeze(-1).double() / heads
    if settings.allocation == "adaptive-floor":
        least = (settings.alpha * total.unsqueeze(-1).double() / heads).floor() - shielded
        safe = ranks(scores, eligible) < least.unsqueeze(-1)
        scores = scores.masked_fill(safe, torch.inf)
    best = ranks(scores.flatten(1), eligible.flatten(1)) < room.unsqueeze(-1)
    count = (best & eligible.flatten(1)).unflatten(1, (heads, n)).sum(-1).double()
    count = count * (room / count.sum(-1).clamp(min=1)).unsqueeze(-1)  # fewer candidates than room: spread the rest
    share = (
        count if settings.allocation == "adaptive-floor" else (1 - settings.alpha) * count + settings.alpha * uniform
    )
    floor = torch.full_like(share, settings.interval + settings.wider_while_decoding).minimum(uniform)
    return shielded + round_to_sum(_bounded(share, floor, eligible.sum(-1).double(), room.unsqueeze(-1).double()))


def _bounded(share: Tensor, floor: Tensor, ceiling: Tensor, room: Tensor) -> Tensor:
    """Shares between floor and ceiling (what a head has) that still add up to `room`, where that is possible."""
    excess = (share - floor).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    share = floor + excess * ((room - floor.sum(-1, keepdim=True)) / torch.where(total > 0, total, 1.0))
    capped = share.minimum(ceiling)
    slack = ceiling - capped
    left = (room - capped.sum(-1, keepdim=True)) / slack.sum(-1, keepdim=True).clamp(min=1e-9)
    return capped + slack * left.clamp(max=1)
