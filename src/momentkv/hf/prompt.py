"""Prompts: files, chat templates, token ids, and words to the person at the terminal."""

import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError


@dataclass(frozen=True)
class Turn:
    """The text around what the user says: `before`, and `after` up to where the answer starts. join: between parts."""

    before: str = ""
    after: str = ""
    join: str = ""

    @classmethod
    def of(cls, tokenizer: Any, system: str | None = None) -> "Turn":
        """From the tokenizer's chat template, or a ValueError that says why not."""
        if not tokenizer.chat_template:
            raise ValueError("this model's tokenizer has no chat template: pass --no-chat-template")
        marker = f"momentkv-{uuid.uuid4().hex}"  # stands for the text, so that the template splits there
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": marker})
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"this model's chat template refuses the conversation: {error}") from error
        if text.count(marker) != 1:
            raise ValueError("this model's chat template does not show the prompt exactly once: use --no-chat-template")
        before, _, after = text.partition(marker)
        return cls(before, after, "\n\n")


def note(text: str) -> None:
    """One line on stderr."""
    print(f"momentkv: {text}", file=sys.stderr)


def read_text(name: str) -> str:
    """A UTF-8 file, or stdin for "-"; a ValueError or OSError that names it when it is empty or unreadable."""
    raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    shown = "standard input" if name == "-" else repr(name)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise ValueError(f"{shown} is empty")
    return text


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Token ids of a text. special: with what the tokenizer adds at the start. Default False."""
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"] if text else []
