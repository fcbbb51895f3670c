"""From what a user asked for to tokens per head, for every layer and row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from momentkv import budgets
from momentkv.budgets import Budget
from momentkv.layer import spec_nbytes, state_spec
from momentkv.settings import Settings

MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Plan:
    """What all layers of one cache share. layers: how many are compressed. prompt_tokens: the whole prompt, if told."""

    settings: Settings
    budget: Budget
    layers: int
    prompt_tokens: int | None = None

    def check(self) -> None:
        """Raise a ValueError when a budget in tokens is below the least possible one, or absurdly large."""
        if self.budget.kind == "tokens":
            self._require_sane(self.budget.amount)
        if self.budget.kind == "tokens" and self.budget.amount < self.settings.least_budget:
            raise ValueError(self._too_small(str(self.budget), ""))

    def _require_sane(self, tokens: float) -> None:
        if tokens > MOST_TOKENS:
            raise ValueError(
                f"budget={self.budget} is {tokens:,.0f} tokens per head, whose slots would all be allocated: at most "
                f"{MOST_TOKENS:,}; to keep everything use method='full'"
            )

    def _too_small(self, given: str, found: str) -> str:
        s = self.settings
        return (
            f"budget={given}{found} is below the least possible one, {s.least_budget} tokens per head "
            f"(sinks {s.sinks} + window {s.least_budget - s.sinks - s.interval} + interval {s.interval})"
        )

    def tokens(self, rank: int, prompt: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mean budget per head of each row for the layer of depth `rank`, `[b]`.

        Args:
            prompt: real tokens of each row in the first update, `[b]`. k, v: its keys and values.
        """
        kind, amount, least = self.budget.kind, self.budget.amount, self.settings.least_budget
        length = torch.full_like(prompt, self.prompt_tokens) if self.prompt_tokens else prompt
        if kind == "share":
            mean = (length * amount).long().clamp(min=least)
        else:
            tokens = int(amount) if kind == "tokens" else self._tokens_of_bytes(k, v)
            mean = torch.full_like(prompt, tokens)
        if self.settings.allocation != "pyramid":
            return mean
        rows = zip(mean.tolist(), length.tolist(), strict=True)
        per_layer = [budgets.pyramid(m, self.settings, self.layers, n)[rank] for m, n in rows]
        return torch.tensor(per_layer, device=prompt.device)

    def _tokens_of_bytes(self, k: Tensor, v: Tensor) -> int:
        batch, heads, _, d = k.shape

        def nbytes(tokens: int) -> int:
            return spec_nbytes(state_spec(self.settings, heads, d, v.shape[-1], heads * (tokens + 1), k.dtype))

        if self.budget.kind == "te":
            available = self.budget.amount * heads * (d + v.shape[-1]) * k.dtype.itemsize
        else:
            available = self.budget.amount / (batch * self.layers)
        tokens = int((available - nbytes(-1)) // (nbytes(0) - nbytes(-1))) - 1
        if tokens < self.settings.least_budget:
            least = nbytes(self.settings.least_budget)
            need = least * batch * self.layers if self.budget.kind == "bytes" else None
            te = -(-least // (heads * (d + v.shape[-1]) * k.dtype.itemsize))
            hint = f'; at least "{need}B"' if need else f'; at least "{te}te"'
            raise ValueError(
                self._too_small(str(self.budget), f" leaves {max(tokens, 0)} tokens beside the summary, which") + hint
            )
        self._require_sane(tokens)
        return tokens
