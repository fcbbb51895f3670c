"""LongBench's metrics (Bai et al., 2023, arXiv 2308.14508), with the numbers of its own scorer.

Each takes a prediction, one reference and the names of all classes, and gives a number from 0 to 1.
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from importlib import import_module
from typing import Any

from momentkv.evals.task import TaskError
from momentkv.evals.tasks.longbench_table import FIRST_LINE, TASKS

Metric = Callable[[str, str, Sequence[str]], float]

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
# the official list has no full-width full stop and no opening double angle bracket, so these two count as text
_WIDE = {chr(ord(mark) + 0xFEE0) for mark in string.punctuation if mark != "."}
_MARKS = (0x2013, 0x2014, 0x2018, 0x2019, *range(0x201B, 0x2020), 0x2026, 0x2027, *range(0x3001, 0x3004))
_MARKS += (*range(0x300B, 0x3012), *range(0x3014, 0x3020), 0x3030, 0x303E, 0x303F, 0xFE4F, *range(0xFF5F, 0xFF65))
_PUNCTUATION = {*string.punctuation, *_WIDE, *map(chr, _MARKS)}


@cache
def _library(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jieba's own code warns when it is compiled
            module = import_module(name)
    except ImportError as error:
        raise TaskError(f"this metric needs {name}: pip install 'momentkv[eval]' ({error})") from error
    if name == "jieba":
        module.setLogLevel("ERROR")  # it reports on stderr how it loads its dictionary
    return module


def _words_zh(text: str) -> list[str]:
    return list(_library("jieba").cut(text, cut_all=False))


def _bag_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    shared = (Counter(prediction) & Counter(answer)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


def f1(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """F1 of the words, without regard to case, ASCII punctuation and articles."""

    def words(text: str) -> list[str]:
        return _ARTICLE.sub(" ", "".join(c for c in text.lower() if c not in string.punctuation)).split()

    return _bag_f1(words(prediction), words(answer))


def f1_zh(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """F1 of jieba's words, without regard to case, punctuation and white space."""

    def words(text: str) -> list[str]:
        bare = ("".join(c for c in word.lower() if c not in _PUNCTUATION) for word in _words_zh(text))
        return [word for word in ("".join(word.split()) for word in bare) if word]

    return _bag_f1(words(prediction), words(answer))


def rouge_l(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L as the package `rouge` 1.0.1 has it; 0 where that fails, such as for an empty prediction."""
    rouge = _library("rouge").Rouge(metrics=["rouge-l"])
    try:
        return rouge.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except Exception:  # what the official scorer does; also for texts too long for the package's recursion
        return 0.0


def rouge_l_zh(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """ROUGE-L over jieba's words."""
    return rouge_l(" ".join(_words_zh(prediction)), " ".join(_words_zh(answer)))


def classification(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """1 / classes named in the prediction, if the true one is among them. Parts of the true name do not count."""
    named = [name for name in all_classes if name in prediction]
    # the official loop removes from the list it walks over, so the name after a removed one is not looked at
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            named.remove(named[at])
        at += 1
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def _retrieval(pattern: str) -> Metric:
    def score(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
        true = re.search(pattern, answer)
        if true is None:
            raise ValueError(f"the answer {answer!r} has no {pattern!r}")
        return count(prediction, true.group(1))

    return score


def code_similarity(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Edit similarity of the first line without backquote, "#" and "//", in whole percent.

    The variant with difflib, which fuzzywuzzy uses where python-Levenshtein is not installed.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


METRICS: dict[str, Metric] = {
    "f1": f1,
    "f1_zh": f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "classification": classification,
    "retrieval": _retrieval(r"Paragraph (\d+)"),
    "retrieval_zh": _retrieval(r"段落(\d+)"),
    "count": count,
    "code_similarity": code_similarity,
}


def row_score(task: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] = ()) -> float:
    """The best score over the references, from 0 to 1.

    Args:
        task: a LongBench task, "trec"; also decides whether only the first line of the prediction counts.

    Raises:
        TaskError: the metric needs a package that is not installed.
    """
    if task in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = METRICS[TASKS[task][0]]
    return max((metric(prediction, answer, all_classes) for answer in answers), default=0.0)
