"""The contract of an evaluation task: samples, and a score for a prediction."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class Sample:
    """One example. The prompt is `context + question`; the answer is begun with `prefix`.

    id: unique in its task, the same in every run. context: what is read before compression under the protocol
    "agnostic". question: the rest of the prompt, never empty for tasks that ask something. answers: the references.
    max_new_tokens: as the benchmark has it. prefix: the start of the answer, which the model is given (RULER).
    chat: whether the prompt is wrapped in the model's chat template. stop: the answer ends before the first of these,
    but has at least one token. all_classes: for classification tasks. facts: what tables and plots group by
    (`length` in tokens, `depth` from 0 to 1, `bucket`, ...), plain JSON values.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    prefix: str = ""
    chat: bool = True
    stop: tuple[str, ...] = ()
    all_classes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where samples come from, the same for all tasks of a run.

    tokenizer: of the model, for lengths and truncation. data: a folder with `longbench/<task>.jsonl` and `ruler/`, or
    None for the Hugging Face hub. texts: text files (fidelity). limit: samples per task, None for all (or the family's
    default). seed: of everything that is drawn. length: tokens of a sample where the task can choose (RULER, niah,
    fidelity), template and answer included. max_length: LongBench prompts above it lose their middle.
    max_tokens: samples whose prompt is longer than this many tokens are left out, None for none. template: whether
    prompts are wrapped in the model's chat template.
    """

    tokenizer: Any
    data: Path | None = None
    texts: tuple[Path, ...] = ()
    limit: int | None = None
    seed: int = 42
    length: int = 4096
    max_length: int = 31500
    max_tokens: int | None = None
    template: bool = True
    follow: int = 128


class Task(ABC):
    """One benchmark task. Subclasses say where samples come from and how a prediction is scored."""

    family: ClassVar[str]
    metric: str  # the name of the score: "f1", "rouge_l", "recall", ...

    def __init__(self, name: str) -> None:
        self.name = name  # within the family

    @property
    def full_name(self) -> str:
        """`family/name`."""
        return f"{self.family}/{self.name}"

    @abstractmethod
    def samples(self, source: Source) -> list[Sample]:
        """The samples, at most `source.limit`, in a fixed order.

        Raises:
            TaskError: the data is missing or damaged; the message is one line and names the file.
        """

    @abstractmethod
    def score(self, prediction: str, sample: Sample) -> float:
        """From 0 to 1."""


class TaskError(ValueError):
    """A task cannot be had: its data is missing or damaged, or an extra is not installed. One line that says which."""
