"""Putting momentkv's attention into a transformers model, for as long as a `with` block lasts."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "momentkv"
# Attribute of the key tensor that a MomentCache hands to the attention function: a weak reference to the layer, which
# may keep that very tensor. A cycle through tensors would hold the memory until some later garbage collection.
_LAYER = "_momentkv_layer"

_lock = threading.RLock()
_attached: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, Any]]" = weakref.WeakKeyDictionary()


def refuse_extras(extras: dict[str, Any]) -> None:
    """Raise for parts of attention that the summary cannot express: they must never be ignored."""
    for name, what in (
        ("softcap", "logit soft-capping"),
        ("s_aux", "attention sinks"),
        ("position_bias", "a position bias"),
    ):
        if extras.get(name) is not None:
            raise NotImplementedError(
                f"this model's attention uses {what} ({name}), which MomentCache does not support"
            )


def tag(key: Tensor, layer: Any) -> Tensor:
    """The same keys as a tensor of their own that says which cache layer is to attend to them."""
    key = key.view_as(key)
    setattr(key, _LAYER, weakref.ref(layer))
    return key


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function: a MomentCache's layer attends itself, any other cache gets transformers' sdpa."""
    reference = getattr(key, _LAYER, None)
    if reference is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    refuse_extras(kwargs)
    return reference().attend(module, query, key, value, attention_mask, **kwargs), None


def _implementations(model: Any) -> Any:
    config = model.config
    subs = {
        key: sub._attn_implementation for key in config.sub_configs if (sub := getattr(config, key, None)) is not None
    }
    return {"": config._attn_implementation, **subs} if subs else config._attn_implementation


@contextmanager
def attend(model: Any) -> Iterator[Any]:
    """Switch a model to momentkv's attention inside the block, and back after it, also after an exception.

    Nested and concurrent uses of one model are counted, so threads may share it; the last to leave restores.
    Ordinary caches behave inside the block as they do with sdpa attention.

    Args:
        model: a transformers model (or a PEFT model around one).

    Raises:
        TypeError: the model cannot switch its attention, or does not support sdpa (soft-capping, attention sinks).
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "set_attn_implementation"):
        raise TypeError(f"attend() needs a transformers model, not {type(model).__name__}")
    if not base._supports_sdpa or not base._can_set_attn_implementation():
        raise TypeError(
            f"{type(base).__name__} has no sdpa attention that can be switched (no attention at all, an older design, "
            "soft-capping, or attention sinks in the model), so a MomentCache cannot be used with it"
        )
    with _lock:
        count, before = _attached.get(base, (0, None))
        if count == 0:
            AttentionInterface.register(NAME, attention_forward)
            AttentionMaskInterface.register(NAME, sdpa_mask)
            before = _implementations(base)
            base.set_attn_implementation(NAME)
        _attached[base] = (count + 1, before)
    try:
        yield model
    finally:
        with _lock:
            count, before = _attached[base]
            if count == 1:
                del _attached[base]
                base.set_attn_implementation(before)
            else:
                _attached[base] = (count - 1, before)
