"""What the figures are measured on: passages of plain texts, or the samples of a task with the model's own answers."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from momentkv.analysis.probe import Read, read
from momentkv.evals.generation import answer
from momentkv.evals.prompts import Prompt, prompt_of, stop_tokens
from momentkv.evals.run import source_of
from momentkv.evals.task import Sample, TaskError
from momentkv.evals.tasks import tasks_of
from momentkv.hf.attention import attend
from momentkv.hf.follow import follow
from momentkv.hf.prefill import prefill
from momentkv.hf.prompt import encode, read_text

REFERENCE = "the Python language reference"


@dataclass(frozen=True)
class Passage:
    """Token ids. source: the text; name: with the token that the passage begins at. start: what the tokenizer begins a
    text with. body: of the text. rest: what follows in it."""

    source: str
    name: str
    start: tuple[int, ...]
    body: tuple[int, ...]
    rest: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.start) + len(self.body)

    def read(self, model: Any, length: int | None = None) -> Read:
        """The last `length` tokens (default all) before the rest, start included, and the rest, with exact attention.

        Every length has the same queries' text.
        """
        cut = 0 if length is None else len(self) - length
        return read(model, (*self.start, *self.body[cut:]), self.rest)


@dataclass(frozen=True)
class Question:
    """A task's sample, followed by the model's own greedy answer from the full cache."""

    source: str
    name: str
    sample: Sample
    prompt: Prompt
    new_tokens: int
    tokenizer: Any

    def __len__(self) -> int:
        return len(self.prompt)

    def read(self, model: Any) -> Read:
        """The context, then question (if it is apart), answer and its end. At least one token follows the prompt."""
        ids = torch.tensor([self.prompt.context], device=model.device)
        with attend(model):
            exact = prefill(model, ids, mass=True)
        room = exact.tokens + len(self.prompt.question) + self.new_tokens + 1
        full = exact.compress(room, "streaming", sinks=0, decoding="grow")  # evicts nothing
        stops, not_first = stop_tokens(model, self.tokenizer, self.sample)
        found: list[int] = []
        answer(
            model,
            [full],
            exact.logits,
            self.prompt.question,
            self.new_tokens,
            stops,
            not_first,
            lambda _, token_ids: found.extend(token_ids),
        )
        end = [min(stops)] if len(found) < self.new_tokens else []
        rest = torch.tensor([[*self.prompt.question, *found, *end]], device=model.device)
        return Read(exact, follow(model, exact, rest))


def documents(paths: Sequence[str]) -> dict[str, str]:
    """Texts by name: the files, or without any the demo's document."""
    if paths:
        return {Path(path).stem: read_text(path) for path in paths}
    from pydoc_data.topics import topics

    return {REFERENCE: "\n\n".join(topics[name] for name in sorted(topics))}


def passages(tokenizer: Any, name: str, text: str, count: int, length: int, more: int) -> list[Passage]:
    """`count` passages of `length` tokens and `more` after them, each from the middle of an equal part of the text.

    Raises:
        ValueError: the text is too short for them.
    """
    start = tuple(encode(tokenizer, "x", special=True)[: -len(encode(tokenizer, "x"))])
    body = length - len(start)
    ids, size = encode(tokenizer, text), body + more
    if body < 1 or len(ids) < size * count:
        raise ValueError(
            f"--length {length}: {name} has {len(ids):,} tokens, and {count} passage(s) of {length:,} and {more} to "
            f"follow need {size * count:,}"
        )
    at = [int((i + 0.5) * len(ids) / count - size / 2) for i in range(count)]
    return [
        Passage(name, f"{name} from token {i}", start, tuple(ids[i : i + body]), tuple(ids[i + body : i + size]))
        for i in at
    ]


def passages_of(args: Namespace, tokenizer: Any, count: int) -> list[Passage]:
    """Of each of `--texts`: `--limit` passages, or `count`."""
    found: list[Passage] = []
    for name, text in documents(args.texts).items():
        found += passages(tokenizer, name, text, args.limit or count, args.length, args.follow)
    return found


def questions_of(args: Namespace, tokenizer: Any, tasks: Sequence[str]) -> list[Question]:
    """The samples of the tasks, answers of at most `--follow` tokens.

    Raises:
        TaskError: an unknown task or one without a prompt and an answer, missing data, or no samples.
    """
    source, found = source_of(args, tokenizer), []
    for task in tasks_of(tasks):
        for sample in task.samples(source):
            prompt = prompt_of(sample, tokenizer, args.protocol, not args.no_chat_template)
            most = min(args.follow, sample.max_new_tokens)
            found.append(Question(task.full_name, f"{task.full_name} {sample.id}", sample, prompt, most, tokenizer))
    if not found:
        raise TaskError(f"no samples of {', '.join(tasks)} (of at most {args.max_tokens} tokens)")
    return found
