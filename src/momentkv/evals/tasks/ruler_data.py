"""What RULER's samples are made of: lm-eval's generators, essays, and documents with questions."""

import importlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from momentkv.evals.task import Source, TaskError

ESSAYS = "PaulGrahamEssays.json"
QA = {"qa_1": "squad_dev_subset_xquad_en.json", "qa_2": "hotpotqa_dev_distractor_100.json"}
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def generators(name: str) -> ModuleType:
    """A module of `lm_eval.tasks.ruler`, which has RULER's wording and generators.

    Raises:
        TaskError: lm-eval is not installed.
    """
    try:
        with mock.patch.dict(os.environ, LOCAL_RANK="1"):  # only rank 0 downloads, and prints, when it is imported
            return importlib.import_module(f"lm_eval.tasks.ruler.{name}")
    except ImportError as error:
        raise TaskError(f"RULER needs lm-eval: pip install 'momentkv[eval]' ({error})") from error


@contextmanager
def own_sentences() -> Iterator[ModuleType]:
    """lm-eval's needle generator with sentences split here: NLTK's splitter would have to be downloaded."""
    module = generators("prepare_niah")
    with mock.patch.object(module, "cached_sent_tokenize", sentences):
        yield module


@lru_cache(maxsize=64)
def sentences(text: str) -> list[str]:
    """Split after full stops, question and exclamation marks."""
    return _SENTENCE_END.split(text)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"RULER: {str(path)!r} is not there") from None
    except (OSError, ValueError) as error:
        raise TaskError(f"RULER: {str(path)!r} cannot be read: {error}") from error


@lru_cache(maxsize=4)
def essay_words(data: Path | None) -> tuple[str, ...]:
    """The words of the essay haystack, from `data/ruler` or from the hub."""
    if data is not None:
        found = _read(data / "ruler" / ESSAYS)
        text = found.get("text") if isinstance(found, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise TaskError(f"RULER: {str(data / 'ruler' / ESSAYS)!r} has no 'text'")
        return tuple(re.sub(r"\s+", " ", text).strip().split(" "))
    try:
        return tuple(generators("prepare_niah").get_haystack("essay"))
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"RULER: the essays cannot be had from the hub ({error}): pass --data DIR") from error


@lru_cache(maxsize=4)
def questions(task: str, data: Path | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions and documents as lm-eval's generator takes them, from `data/ruler` or from where lm-eval gets them."""
    if data is None:
        module = generators("qa_utils")
        try:
            return module.read_squad() if task == "qa_1" else module.read_hotpotqa()
        except Exception as error:
            raise TaskError(f"RULER: {task} cannot be downloaded ({error}): pass --data DIR") from error
    path = data / "ruler" / QA[task]
    found = _read(path)
    try:
        return _squad(found) if task == "qa_1" else _hotpot(found)
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"RULER: {str(path)!r} is not in the official form: {error!r}") from error


def _squad(found: Any) -> tuple[list[dict[str, Any]], list[str]]:
    articles = [article["paragraphs"] for article in found["data"]]
    docs = sorted({p["context"] for paragraphs in articles for p in paragraphs})
    index = {text: i for i, text in enumerate(docs)}
    asked = []
    for paragraphs in articles:
        whole = [index[p["context"]] for p in paragraphs]
        for p in paragraphs:
            own = index[p["context"]]
            asked += [
                {
                    "query": q["question"],
                    "outputs": [a["text"] for a in q["answers"]],
                    "context": [own],
                    "more_context": [i for i in whole if i != own],
                }
                for q in p["qas"]
                if not q.get("is_impossible")
            ]
    return asked, docs


def _hotpot(found: Any) -> tuple[list[dict[str, Any]], list[str]]:
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in d["context"]] for d in found]
    docs = sorted({text for own in texts for text in own})
    index = {text: i for i, text in enumerate(docs)}
    asked = [
        {"query": d["question"], "outputs": [d["answer"]], "context": [index[text] for text in own]}
        for d, own in zip(found, texts, strict=True)
    ]
    return asked, docs


def source_key(source: Source) -> Path | None:
    """The data folder, made absolute so that it can be a cache's key."""
    return source.data.resolve() if source.data is not None else None
