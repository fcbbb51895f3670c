"""MomentCache: a transformers cache of constant size."""

import os
import warnings
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from momentkv.budgets import Budget
from momentkv.hf.layer import MomentLayer
from momentkv.hf.plan import Plan
from momentkv.methods import settings_for
from momentkv.report import Report
from momentkv.settings import Settings

_UNTOUCHED = ("DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")
_announced: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _announced:
        _announced.add(message)
        warnings.warn(message, stacklevel=4)


def _check_config(config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ValueError(f"MomentCache serves decoder-only models, not the encoder-decoder {config.model_type!r}")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise NotImplementedError(
            f"{config.model_type!r} caps its attention logits (attn_logit_softcapping="
            f"{config.attn_logit_softcapping}), which MomentCache does not support"
        )


class MomentCache(Cache):
    """A KV cache that holds a fixed budget of tokens per head and, for `momentkv`, a summary of the rest.

        with attend(model):
            model.generate(**inputs, past_key_values=MomentCache(model.config, budget=128))

    All state lives here: one cache, one conversation. The first token after a prompt always comes from exact
    attention, since compression follows the prompt's own attention. `get_seq_length()` counts tokens seen.

    Args:
        config: the model's configuration. Sliding-window and linear-attention layers keep transformers' own cache.
        budget: tokens per KV head (128: the summary comes on top), a share of the prompt (0.1), or bytes with the
            summary included: "16MiB" for the whole cache, all rows of the batch, or "128te" for the bytes of 128
            tokens per head. Window and sinks are part of it. Prompts that fit are left alone. A share that comes to
            less than sinks, window and one token is raised to that. The slots of the whole budget are allocated with
            the prompt; to keep everything use `method="full"`.
        method: a name of `momentkv.METHODS`, or "name:preset"; default "momentkv".
        preset: a published variant of the method, such as "paper".
        prompt_tokens: length of the whole prompt, needed for a share budget when the prompt comes in chunks.
        options: any field of `Settings`, or of the score's policy, e.g. `window=64, correction="off", kernel=5`.

    Raises:
        ValueError: an unknown or impossible option, naming what is valid. NotImplementedError: a model whose
        attention MomentCache cannot express.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        budget: int | float | str | Budget = 128,
        method: str = "momentkv",
        preset: str | None = None,
        prompt_tokens: int | None = None,
        **options: Any,
    ) -> None:
        _check_config(config)
        settings = settings_for(method, preset, **options)
        layers = DynamicCache(config=config).layers
        full = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
        others = {type(layer).__name__ for i, layer in enumerate(layers) if i not in full}
        if unknown := others - set(_UNTOUCHED):
            raise NotImplementedError(f"{config.model_type!r} has layers that MomentCache does not support: {unknown}")
        if others and settings is not None:
            _say_once(
                f"momentkv: {len(layers) - len(full)} of {len(layers)} layers of this {config.model_type!r} model have "
                "a window or state of constant size already and are left as they are"
            )
        self.settings: Settings | None = settings
        self.budget = Budget.parse(budget)
        self.method = method if preset is None or ":" in method else f"{method}:{preset}"
        self.config = config
        self.prompt_tokens = prompt_tokens
        if settings is not None:
            plan = Plan(settings, self.budget, len(full), prompt_tokens)
            plan.check()
            for rank, i in enumerate(full):
                layers[i] = MomentLayer(plan, rank, i)
        self._awaiting: MomentLayer | None = None
        self._last_index, self._start = -1, 0  # of the forward pass under way
        super().__init__(layers=layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Hand new keys and values to a layer; the attention function picks them up from the returned key."""
        if self._awaiting is not None and self._awaiting.pending:
            raise RuntimeError(
                "a MomentCache was handed to a model whose attention ignored it: wrap the call in "
                "`with momentkv.hf.attend(model):`. (Inside it: an earlier forward pass was interrupted, so start a "
                "new cache; or the model changes its keys after the cache, as latent attention does: not supported)"
            )
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache was made for a model of {len(self.layers)} layers, but layer {layer_idx} uses it: "
                "pass the config of the model itself"
            )
        layer = self.layers[layer_idx]
        self._require_complete_passes(layer_idx, self.get_seq_length(layer_idx))
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._awaiting = layer if isinstance(layer, MomentLayer) else None
        return result

    def _require_complete_passes(self, layer_idx: int, seen: int) -> None:
        """All layers must have seen the same tokens; an exception amid a forward pass leaves them apart."""
        if self._last_index < 0 or layer_idx <= self._last_index:
            self._start = seen
        self._last_index = layer_idx
        if seen != self._start:
            raise RuntimeError(
                f"layer {layer_idx} of this cache has seen {seen} tokens and another layer {self._start}: an earlier "
                "forward pass was interrupted; reset() the cache or start a new one"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Only `crop(0)` is possible: evicted tokens cannot come back, so assisted decoding is refused."""
        if tokens_to_remove != 0:
            raise ValueError(
                f"crop({tokens_to_remove}): a MomentCache cannot be rolled back (assisted and speculative decoding "
                "need that); use method='full' or a DynamicCache for them"
            )

    def activate_past_recording(self) -> None:
        """Refused: what is evicted is not recorded."""
        raise ValueError("a MomentCache cannot be rolled back, so assisted and speculative decoding cannot use it")

    def reset(self) -> None:
        """Forget everything, as if new."""
        self._awaiting, self._last_index = None, -1
        super().reset()

    @property
    def moment_layers(self) -> list[MomentLayer]:
        """The layers that are compressed, in order of depth."""
        return [layer for layer in self.layers if isinstance(layer, MomentLayer)]

    def positions(self, layer: int, head: int, row: int = 0) -> Tensor:
        """Positions that a head still holds exactly, ascending, counted in the row without padding.

        Raises:
            IndexError: a layer that is not compressed, or not filled yet.
        """
        chosen = self.layers[layer]
        if not isinstance(chosen, MomentLayer) or chosen.state is None:
            raise IndexError(f"layer {layer} holds no compressed tokens")
        held = chosen.state.dense(chosen.state.positions)[row, head]
        return held[held >= 0].sort().values

    def report(self) -> Report:
        """Tokens and bytes really held, per layer and head, the summary apart."""
        return Report.of(self)

    def save(self, path: str | os.PathLike[str], token_ids: Tensor | None = None) -> None:
        """Write the whole cache to one safetensors file, atomically.

        Args:
            path: the file. token_ids: optional, the tokens the cache has seen, `[b, n]`, kept for `load`.
        """
        from momentkv.hf.saving import save

        save(self, path, token_ids)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: PreTrainedConfig, device: Any = "cpu", **expected: Any
    ) -> "MomentCache":
        """Read a cache written by `save`.

        Args:
            config: of the model it will be used with; must describe the model it was made with.
            device: where to put it. expected: `budget`, `method` or `preset`; another one in the file is an error.

        Returns:
            The cache; `cache.token_ids` holds the tokens given to `save`, or None.

        Raises:
            momentkv.hf.CacheFileError: a file for another model, budget, method or version, or a damaged one.
        """
        from momentkv.hf.saving import load

        return load(path, config, device, expected)

    token_ids: Tensor | None = None
