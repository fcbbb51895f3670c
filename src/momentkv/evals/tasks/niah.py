"""`niah`: one needle in a haystack, over a grid of lengths and depths (the plot known from Greg Kamradt's test)."""

import hashlib
import random
from dataclasses import replace
from itertools import product

from momentkv.evals.prompts import prompt_of
from momentkv.evals.string_match import string_match_all
from momentkv.evals.task import Sample, Source, Task, TaskError
from momentkv.evals.tasks.ruler_data import ESSAYS, essay_words, source_key
from momentkv.hf.prompt import encode, read_text

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORTER = (4, 2, 1)  # lengths: the one asked for divided by these
NEW_TOKENS = 32
_CITIES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Riga", "Tunis", "Utrecht", "Vilnius", "Winnipeg", "Zagreb")


def _haystack(source: Source) -> str:
    """Text files that were named, else RULER's essays, else the language reference that comes with Python."""
    if source.texts:
        try:
            return "\n\n".join(read_text(str(path)) for path in source.texts)
        except (OSError, ValueError) as error:
            raise TaskError(f"niah: {error}") from error
    if source.data is not None and (source.data / "ruler" / ESSAYS).exists():
        return " ".join(essay_words(source_key(source)))
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class Grid(Task):
    """`limit` (default 1) needles for each length and depth. The score is 1 where the number is in the answer."""

    family = "niah"
    metric = "match_all"

    def __init__(self) -> None:
        super().__init__("grid")

    def score(self, prediction: str, sample: Sample) -> float:
        """Whether the number is found."""
        return string_match_all(prediction, sample.answers)

    def samples(self, source: Source) -> list[Sample]:
        """Lengths of a quarter, a half and all of `source.length`, five depths each."""
        ids = encode(source.tokenizer, _haystack(source)[: 12 * source.length])
        lengths = [source.length // part for part in SHORTER]
        cells = product(lengths, DEPTHS, range(source.limit or 1))
        return [self._fitted(ids, source, length, depth, index) for length, depth, index in cells]

    def _fitted(self, ids: list[int], source: Source, length: int, depth: float, index: int) -> Sample:
        """Cut the haystack by what the prompt is too long; tokens merge where texts meet, so it may take two cuts."""
        size = length
        for _ in range(8):
            sample = self._sample(ids[:size], source, length, depth, index)
            template = source.template and bool(source.tokenizer.chat_template)
            tokens = len(prompt_of(sample, source.tokenizer, "aware", template))
            over = tokens + NEW_TOKENS - length
            if over <= 0:
                return replace(sample, facts={**sample.facts, "tokens": tokens})
            size -= over
            if size < 1:
                break
        raise TaskError(f"niah: no needle fits into {length} tokens (a quarter of --length {source.length})")

    def _sample(self, ids: list[int], source: Source, length: int, depth: float, index: int) -> Sample:
        ident = f"{length}-{depth}-{index}"
        draw = random.Random(hashlib.sha256(f"{source.seed} {ident}".encode()).hexdigest())
        city, number = draw.choice(_CITIES), str(draw.randrange(10**6, 10**7))
        needle = f" The telephone number of the {city} office is {number}."
        text = source.tokenizer.decode(ids)
        at = round(depth * len(text))
        if 0 < at < len(text):  # after a sentence if one ends near, else between words
            sentence, word = text.rfind(". ", 0, at) + 1, max(0, text.rfind(" ", 0, at))
            at = sentence if at - sentence < 0.05 * len(text) else word
        context = f"Read this text.\n\n{text[:at]}{needle}{text[at:]}"
        question = f"\n\nWhat is the telephone number of the {city} office? Answer with the number only."
        facts = {"length": length, "depth": depth}
        return Sample(ident, context, question, (number,), NEW_TOKENS, facts=facts)


def niah_tasks() -> list[Task]:
    """The grid."""
    return [Grid()]
