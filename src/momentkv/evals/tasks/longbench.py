"""LongBench (Bai et al., 2023, arXiv 2308.14508): 21 tasks, and the 13 of LongBench-E, with their official prompts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from momentkv.evals.metrics import row_score
from momentkv.evals.prompts import prompt_of
from momentkv.evals.task import Sample, Source, Task, TaskError
from momentkv.evals.tasks.longbench_data import Row, rows_of, template
from momentkv.evals.tasks.longbench_table import EXTENDED, NO_CHAT, STOPS, TASKS
from momentkv.hf.prompt import encode


def split_prompt(task: str, row: Row) -> tuple[str, str]:
    """The official prompt in two: up to the end of the row's context, and the rest."""
    before, after = template(task)
    return before + row.context, after.replace("{{question}}", row.question)


def without_middle(context: str, question: str, tokenizer: Any, max_length: int) -> tuple[str, str]:
    """The prompt as it is, or of one above `max_length` tokens the first and the last `max_length // 2`.

    As official, each half is decoded by itself and the text is tokenised again. Where the cut goes through the
    question, what is left of it after the cut is the question.
    """
    ids = encode(tokenizer, context + question, special=True)
    if len(ids) <= max_length:
        return context, question
    if max_length < 2:
        raise TaskError(f"LongBench: --max-length {max_length} leaves nothing of a prompt; at least 2")
    half = max_length // 2
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    at = max(len(first), len(first) + len(last) - len(question))
    whole = first + last
    return whole[:at], whole[at:]


def bucket_of(length: int) -> str:
    """LongBench-E's, by the length that the row states."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


class _Rows(Task):
    """What LongBench and LongBench-E share."""

    extended: ClassVar[bool]

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.metric, self.new_tokens = TASKS[name]

    def score(self, prediction: str, sample: Sample) -> float:
        """The official score of the task, the best over the references."""
        return row_score(self.name, prediction, sample.answers, sample.all_classes)

    def samples(self, source: Source) -> list[Sample]:
        """The first `source.limit` rows (default all) of at most `source.max_tokens` tokens.

        facts: words (the row's `length`), tokens (of the prompt, template included), and bucket for LongBench-E.
        """
        samples: list[Sample] = []
        for row in rows_of(self.name, source.data, self.extended):
            if source.limit is not None and len(samples) >= source.limit:
                break
            sample = self._sample(row, source)
            if source.max_tokens is None or sample.facts["tokens"] <= source.max_tokens:
                samples.append(sample)
        return samples

    def _sample(self, row: Row, source: Source) -> Sample:
        context, question = split_prompt(self.name, row)
        context, question = without_middle(context, question, source.tokenizer, source.max_length)
        chat = self.name not in NO_CHAT

        def sample(facts: Mapping[str, Any]) -> Sample:
            return Sample(
                row.id,
                context,
                question,
                row.answers,
                self.new_tokens,
                chat=chat,
                stop=STOPS.get(self.name, ()),
                all_classes=row.all_classes,
                facts=facts,
            )

        template = source.template and bool(source.tokenizer.chat_template)
        facts = {"words": row.length, "tokens": len(prompt_of(sample({}), source.tokenizer, "aware", template))}
        return sample(facts | ({"bucket": bucket_of(row.length)} if self.extended else {}))


class LongBench(_Rows):
    """One of the 21 tasks."""

    family = "longbench"
    extended = False


class LongBenchE(_Rows):
    """One of the 13 tasks with lengths spread evenly; reported per bucket of length."""

    family = "longbench-e"
    extended = True


def longbench_tasks() -> list[Task]:
    """The 21 tasks of LongBench, then the 13 of LongBench-E."""
    return [*map(LongBench, TASKS), *map(LongBenchE, EXTENDED)]
