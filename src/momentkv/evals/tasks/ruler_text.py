"""The text of one RULER sample of a given size. Each maker takes the size of the haystack and gives the parts."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from momentkv.evals.task import Source
from momentkv.evals.tasks.ruler_data import essay_words, generators, own_sentences, questions, source_key

NIAH: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_2": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_3": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "uuids"},
    "niah_multikey_1": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers", "keys": 4},
    "niah_multikey_2": {"type_haystack": "needle", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multivalue": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers", "values": 4},
    "niah_multiquery": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "keys": 4,
        "queries": 4,
    },
}
_ICL_NOISES = 10  # sentences in vt's worked example: about 500 tokens, as RULER has it


@dataclass(frozen=True)
class Text:
    """Parts of a sample. answers: the references."""

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]


Maker = Callable[[int], Text]


@contextmanager
def seeded(seed: str) -> Iterator[None]:
    """The generators draw from the process's own random state: set it, and put it back afterwards."""
    import numpy as np

    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(random.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)


def _split(text: str, marker: str) -> tuple[str, str]:
    at = text.rindex(marker)
    return text[:at], text[at:]


def niah_maker(task: str, source: Source) -> Maker:
    """size: words of the essays, or sentences."""
    own = NIAH[task]
    keys, values, asked = (own.get(name, 1) for name in ("keys", "values", "queries"))
    template = generators("niah_utils").TEMPLATE
    kinds = {name: own[name] for name in ("type_haystack", "type_needle_k", "type_needle_v")}
    if own["type_haystack"] == "essay":
        haystack: Sequence[str] = list(essay_words(source_key(source)))
    else:
        haystack = generators("prepare_niah").get_haystack(own["type_haystack"])

    def make(size: int) -> Text:
        enough = haystack
        while own["type_haystack"] == "essay" and len(enough) < size:
            enough = [*enough, *haystack]
        with own_sentences() as module:
            text, answers, query = module.generate_input_output(
                size,
                enough,
                **kinds,
                num_needle_k=keys,
                num_needle_v=values,
                num_needle_q=asked,
                template=template,
                random_seed=source.seed,
            )
        context, question = _split(text, "\nWhat ")
        single = asked * values == 1
        kind = own["type_needle_v"][:-1] if single else own["type_needle_v"]
        prefix = f" The special magic {kind} for {query} mentioned in the provided text {'is' if single else 'are'}"
        return Text(context, question, prefix, tuple(answers))

    return make


def vt_maker(task: str, source: Source) -> Maker:
    """size: noise sentences. A worked example stands before the text, as in RULER."""
    module = generators("vt_utils")
    start = module.CONFIG["variable_tracking"]["answer_prefix"][:20]

    def make(size: int) -> Text:
        example, names = module.generate_input_output(_ICL_NOISES, 1, 4, is_icl=True)
        example = module.randomize_icl(f"{example} {' '.join(names)}\n")
        text, answers = module.generate_input_output(size, 1, 4)
        text, prefix = _split(text, start)
        context, question = _split(text, "\nQuestion: ")
        return Text(f"{example}\n\n{context}", question, prefix.rstrip(), tuple(answers))

    return make


def cwe_maker(task: str, source: Source) -> Maker:
    """size: different words."""
    module = generators("cwe_utils")

    def make(size: int) -> Text:
        module.RNG.seed(random.getrandbits(32))  # its own, which would remember what was made before
        example, text, answers = module.generate_input_output(min(size, len(module.WORDS)), source.length)
        text, prefix = _split(text, module.CONFIG["answer_prefix"])
        context, question = _split(text, "\nQuestion: ")
        return Text(f"{example}\n{context}", question, prefix, tuple(answers))

    return make


class _NoTokens:
    """A tokenizer that finds nothing too long: sizes are fitted here."""

    input_ids = ()

    def __call__(self, text: str) -> "_NoTokens":
        return self


def fwe_maker(task: str, source: Source) -> Maker:
    """size: words in all."""
    module = generators("fwe_utils")

    def make(size: int) -> Text:
        text, answers, _ = module.generate_input_output(
            source.length, _NoTokens(), num_words=size, vocab_size=max(8, source.length // 50)
        )
        text, prefix = _split(text, module.CONFIG["answer_prefix"])
        context, question = _split(text, "\nQuestion: ")
        return Text(context, question, prefix, tuple(answers))

    return make


def qa_maker(task: str, source: Source) -> Maker:
    """size: documents. Which question is asked is drawn."""
    module = generators("qa_utils")
    asked, docs = questions(task, source_key(source))

    def make(size: int) -> Text:
        index = random.randrange(len(asked))
        text, answers = module.generate_input_output(index, max(size, len(asked[index]["context"])), asked, docs)
        context, question = _split(text, "\n\nAnswer the question based on")
        return Text(context, question, " Answer:", tuple(answers))

    return make
