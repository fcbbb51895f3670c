"""From a sample to token ids, under either protocol."""

from dataclasses import dataclass
from typing import Any, Literal

from momentkv.evals.task import Sample
from momentkv.hf.prompt import Turn, encode

Protocol = Literal["aware", "agnostic"]
PROTOCOLS = ("aware", "agnostic")


@dataclass(frozen=True)
class Prompt:
    """Token ids. context: read before compression. question: read after it, empty under the protocol "aware"."""

    context: list[int]
    question: list[int]

    def __len__(self) -> int:
        return len(self.context) + len(self.question)


def prompt_of(sample: Sample, tokenizer: Any, protocol: Protocol, template: bool = True) -> Prompt:
    """The tokens of a sample.

    "aware": all of the prompt is one text, compressed with the question in it (LongBench's and the paper's protocol).
    "agnostic": what comes before the question is compressed first; the question, the end of the chat template and the
    start of the answer follow as a second text.

    Args:
        template: wrap in the chat template the samples that want one.

    Raises:
        ValueError: the tokenizer has no chat template, or under "agnostic" nothing stands before the question.
    """
    turn = Turn.of(tokenizer) if template and sample.chat else Turn()
    special = not turn.before  # a template brings its own start of text
    head, tail = turn.before + sample.context, sample.question + turn.after + sample.prefix
    if protocol == "aware":
        return Prompt(encode(tokenizer, head + tail, special), [])
    context, question = encode(tokenizer, head, special), encode(tokenizer, tail)
    if not context or not question:
        raise ValueError(f"sample {sample.id!r} has no {'question' if context else 'context'} of its own")
    return Prompt(context, question)


def stop_tokens(model: Any, tokenizer: Any, sample: Sample) -> tuple[set[int], set[int]]:
    """Tokens that end an answer, and those of them that may not come first (samples that stop at a string)."""
    given = [getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id]
    flat = [t for ids in given if ids is not None for t in (ids if isinstance(ids, list) else [ids])]
    ends = {encode(tokenizer, text)[-1] for text in sample.stop}
    stops = {*flat, *ends}
    return stops, stops if sample.stop else set()
