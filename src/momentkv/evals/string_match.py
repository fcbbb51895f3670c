"""RULER's two metrics: references found in a prediction."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return [answer.lower() in text for answer in answers]


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the references that occur in the prediction, without regard to case."""
    return sum(_found(prediction, answers)) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 where any reference occurs in the prediction, without regard to case."""
    return float(any(_found(prediction, answers)))
