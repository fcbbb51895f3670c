"""A model of EleutherAI's lm-evaluation-harness whose cache is compressed: `MomentLM`, registered as "momentkv".

simple_evaluate(MomentLM(pretrained="HuggingFaceTB/SmolLM2-135M-Instruct", budget=128), tasks=[...])
simple_evaluate("momentkv", model_args="pretrained=...,budget=128,method=snapkv", tasks=[...])  # once imported
"""

import inspect
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from momentkv import Budget
from momentkv.hf import MomentCache, attend, prefill
from momentkv.hf.compat import cache_argument
from momentkv.hf.prefill import WINDOW, Prefill
from momentkv.methods import settings_for

Request = tuple[Any, list[int], list[int]]  # the strings, the context's tokens, the continuation's

_REFUSED = ("peft", "delta", "autogptq", "gptqmodel", "tp_plan")
_HFLM = frozenset(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}


@register_model("momentkv")
class MomentLM(HFLM):
    """lm-eval's `HFLM`, decoding from a `MomentCache`.

    Generation compresses the prompt, question included. A log-likelihood is that of the continuation after the
    *compressed* context: the context is read exactly, so that its last token predicts the first token of the
    continuation as the full cache does, and the rest of the continuation sees what is left of it.

    Args:
        pretrained: as in HFLM, like all of its arguments by name. budget, method, preset: as in `MomentCache`; default
            128 and "momentkv". model_kwargs: for `from_pretrained`. options: settings, such as `window=64`.

    Raises:
        ValueError: an unknown method, preset, option or budget, before the model is loaded; adapters and quantisers
            of HFLM, which are not tested with a compressed cache.
    """

    def __init__(
        self,
        pretrained: Any,
        budget: int | float | str = 128,
        method: str = "momentkv",
        preset: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        inherited = {name: options.pop(name) for name in list(options) if name in _HFLM}
        if refused := [name for name in _REFUSED if inherited.get(name)]:
            raise ValueError(
                f"momentkv does not take {refused[0]}={inherited[refused[0]]!r}: load a plain causal model"
            )
        if inherited.get("backend", "default") == "seq2seq":
            raise ValueError("backend='seq2seq': a compressed cache is for decoder-only models")
        self.compression = {"budget": budget, "method": method, "preset": preset, **options}
        Budget.parse(budget)
        self.settings = settings_for(method, preset, **options)
        inherited.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained, **inherited, **(model_kwargs or {}))
        MomentCache(self.model.config, **self.compression)  # raises for a model that cannot be compressed

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        return super().get_model_info() | {"momentkv": self.compression}

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        cache = MomentCache(self.model.config, **self.compression)
        with attend(self.model):
            return super()._model_generate(context, max_length, stop, **cache_argument(cache), **kwargs)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refused: the likelihood of a whole text has no context that could be compressed before the rest is read.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "perplexity of a whole text has no prompt to compress: `momentkv eval --tasks fidelity` has that after one"
        )

    def _read(self, context: list[int]) -> Prefill:
        needs_mass = self.settings is not None and self.settings.policy.needs_mass
        window = max(WINDOW, self.settings.window if self.settings is not None else 0)
        return prefill(self.model, torch.tensor([context], device=self.device), window=window, mass=needs_mass)

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """As HFLM: what is too long loses its beginning.

        Raises:
            ValueError: the continuation alone is too long.
        """
        if len(continuation) >= self.max_length:
            raise ValueError(f"a continuation of {len(continuation)} tokens, and max_length={self.max_length}")
        kept = (context + continuation)[-(self.max_length + 1) :]
        return kept[: -len(continuation)], continuation

    @torch.no_grad()
    def _score(self, exact: Prefill, continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood of the continuation, and whether it is what greedy decoding would say."""
        ids = torch.tensor([continuation], device=self.device)
        logits = exact.logits
        if len(continuation) > 1:
            prompt_tokens = None if self.settings is None else exact.tokens  # for budgets that are a share of it
            cache = exact.compress(**self.compression, prompt_tokens=prompt_tokens)
            with attend(self.model):
                rest = self.model(input_ids=ids[:, :-1], use_cache=True, **cache_argument(cache)).logits[0]
            logits = torch.cat([logits, rest])
        logp = logits.log_softmax(-1, dtype=self.softmax_dtype or torch.float32)
        taken = logp.gather(-1, ids[0].unsqueeze(-1))
        return float(taken.sum()), bool((logits.argmax(-1) == ids[0]).all())

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """One by one, since rows would be padded; continuations of the same context share its prefill."""
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i][1]), requests[i][1]))
        previous: list[int] | None = None
        exact: Prefill | None = None
        for i in tqdm(order, desc="log-likelihoods", disable=disable_tqdm or self.rank != 0):
            strings, *tokens = requests[i]
            context, continuation = self._cut(*tokens)
            if exact is None or context != previous:
                exact, previous = self._read(context), context
            answers[i] = self._score(exact, continuation)
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answers[i])
        return answers
