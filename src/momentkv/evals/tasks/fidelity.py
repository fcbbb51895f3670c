"""`fidelity`: passages of any text, and how far a compressed cache strays from the full one on what follows."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from momentkv.evals.task import Sample, Source, Task, TaskError
from momentkv.hf.prompt import encode, read_text

PASSAGES = 2  # per text, unless a limit says otherwise


@dataclass(frozen=True)
class Passage(Sample):
    """A sample in tokens. token_ids: the prompt and what follows. prompt: how many of them are the prompt."""

    token_ids: tuple[int, ...] = ()
    prompt: int = 0


class Fidelity(Task):
    """One text. Its passages are evenly spread and do not overlap. Measured by KL divergence and more, not scored."""

    family = "fidelity"
    metric = "kl"

    def __init__(self, path: Path) -> None:
        super().__init__(path.stem)
        self.path = path

    def samples(self, source: Source) -> list[Sample]:
        """`source.limit` passages (default 2) of `source.length` prompt tokens and `source.follow` more."""
        try:
            text = read_text(str(self.path))
        except (OSError, ValueError) as error:
            raise TaskError(f"fidelity: {error}") from error
        ids = encode(source.tokenizer, text)
        start = encode(source.tokenizer, "x", special=True)[: -len(encode(source.tokenizer, "x"))]
        size, count = source.length - len(start) + source.follow, source.limit or PASSAGES
        if len(ids) < size * count:
            raise TaskError(
                f"fidelity: {str(self.path)!r} has {len(ids):,} tokens, too few for {count} passages of {size:,}: "
                f"at most {len(ids) // size} fit"
            )
        gap = (len(ids) - size) // max(1, count - 1)
        return [self._passage(i * gap, (*start, *ids[i * gap : i * gap + size]), source) for i in range(count)]

    def _passage(self, at: int, token_ids: tuple[int, ...], source: Source) -> Passage:
        digest = hashlib.sha256(str(token_ids).encode()).hexdigest()[:12]
        facts = {"length": source.length, "offset": at, "tokens_sha": digest}
        return Passage(f"{at}", "", "", (), 0, facts=facts, token_ids=token_ids, prompt=source.length)

    def score(self, prediction: str, sample: Sample) -> float:
        """Not scored: see `momentkv.evals.fidelity`."""
        raise NotImplementedError("fidelity compares distributions, it does not score predictions")
