"""RULER (Hsieh et al., 2024, arXiv 2404.06654): 13 tasks at any length, for any tokenizer.

Wording and generators are lm-eval's, called at run time. Otherwise than there, the haystack is fitted per sample, the
chat template and the start of the answer count in the length, and every sample has a random state of its own, so that
fewer samples are the first of more. Questions of qa are drawn instead of taken in order.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from momentkv.evals.prompts import prompt_of
from momentkv.evals.string_match import string_match_all, string_match_part
from momentkv.evals.task import Sample, Source, Task, TaskError
from momentkv.evals.tasks.ruler_text import (
    NIAH,
    Maker,
    Text,
    cwe_maker,
    fwe_maker,
    niah_maker,
    qa_maker,
    seeded,
    vt_maker,
)

SAMPLES = 500  # per task, as in RULER
REDRAWS = 50
# maker, new tokens, least size of the haystack
_TASKS: dict[str, tuple[Callable[[str, Source], Maker], int, int]] = {
    **{name: (niah_maker, 128, 8) for name in NIAH},
    "vt": (vt_maker, 30, 6),
    "cwe": (cwe_maker, 120, 12),
    "fwe": (fwe_maker, 50, 60),
    "qa_1": (qa_maker, 32, 1),
    "qa_2": (qa_maker, 32, 1),
}


def largest(fits: Callable[[int], bool], least: int, guess: int) -> int | None:
    """The largest size that fits, or nearly (to 1 %); None when even the least does not."""
    if not fits(least):
        return None
    low, high = least, max(guess, least + 1)
    while fits(high) and high < 1 << 24:
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Ruler(Task):
    """One task. `score` is the share of references found ("all"), or whether any is ("part": qa)."""

    family = "ruler"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._maker, self.new_tokens, self._least = _TASKS[name]
        self.metric = "match_part" if name.startswith("qa") else "match_all"

    def score(self, prediction: str, sample: Sample) -> float:
        """RULER's string match, without regard to case."""
        match = string_match_part if self.metric == "match_part" else string_match_all
        return match(prediction, sample.answers)

    def samples(self, source: Source) -> list[Sample]:
        """`source.limit` samples (default 500) of at most `source.length` tokens, answer included."""
        make, size, samples = self._maker(self.name, source), 64, []
        for index in range(source.limit or SAMPLES):
            sample, size = self._fitted(make, source, index, size)
            samples.append(sample)
        return samples

    def _fitted(self, make: Maker, source: Source, index: int, guess: int) -> tuple[Sample, int]:
        """A sample and its size. A draw that cannot fit (a question with long documents) is drawn again."""
        for attempt in range(REDRAWS):

            def at(size: int, attempt: int = attempt) -> Sample:
                with seeded(f"{self.name} {source.seed} {source.length} {index} {attempt}"):
                    return self._sample(make(size), source, index)

            def fits(size: int, at: Callable[[int], Sample] = at) -> bool:
                return self._tokens(at(size), source) <= source.length

            # the size of the sample before is nearly right: try it, and a little less, before searching again
            size = next((s for s in (guess, guess * 99 // 100, guess * 97 // 100) if index and fits(s)), None)
            size = size or largest(fits, self._least, guess)
            if size is not None:
                sample = at(size)
                facts = {**sample.facts, "tokens": self._tokens(sample, source) - self.new_tokens}
                return replace(sample, facts=facts), max(size, guess) if index else size
        least = self._tokens(at(self._least), source)
        raise TaskError(f"{self.full_name}: no sample fits into --length {source.length}; at least about {least}")

    def _tokens(self, sample: Sample, source: Source) -> int:
        template = source.template and bool(source.tokenizer.chat_template)
        return len(prompt_of(sample, source.tokenizer, "aware", template)) + self.new_tokens

    def _sample(self, text: Text, source: Source, index: int) -> Sample:
        facts: dict[str, Any] = {"length": source.length}
        if self.name.startswith("niah"):
            found = [text.context.find(answer) / len(text.context) for answer in text.answers]
            facts["depth"] = round(sum(found) / len(found), 3)
        ident = f"{source.length}-{index}"
        return Sample(ident, text.context, text.question, text.answers, self.new_tokens, text.prefix, facts=facts)


def ruler_tasks() -> list[Task]:
    """All 13."""
    return [Ruler(name) for name in _TASKS]
