"""A progress bar for a forward pass over many tokens."""

from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress


class LayerProgress:
    """A bar on stderr that advances per decoder layer, over `passes` forward passes; nothing where no terminal is."""

    def __init__(self, model: Any, text: str, passes: int = 1) -> None:
        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        depth = model.config.get_text_config().num_hidden_layers
        lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth)
        self._layers: Any = next(lists, [])
        self._task = self._bar.add_task(text, total=depth * passes)
        self._hooks: list[Any] = []

    def __enter__(self) -> "LayerProgress":
        self._bar.start()
        self._hooks = [layer.register_forward_hook(self._advance) for layer in self._layers]
        return self

    def _advance(self, *_: Any) -> None:
        self._bar.advance(self._task)

    def close(self, *_: Any) -> None:
        """Take the bar and the hooks away; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._bar.stop()

    __exit__ = close
