"""One sample, all variants: from one exact prefill to rows."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from momentkv.evals import fidelity
from momentkv.evals.caches import Held, compress_all
from momentkv.evals.generation import answer
from momentkv.evals.prompts import Protocol, prompt_of, stop_tokens
from momentkv.evals.task import Sample, Task
from momentkv.evals.tasks.fidelity import Passage
from momentkv.evals.variants import Variant
from momentkv.hf.attention import attend
from momentkv.hf.prefill import prefill

Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Setup:
    """What every sample of a run is measured with. template: wrap prompts in the chat template."""

    model: Any
    tokenizer: Any
    variants: list[Variant]
    protocol: Protocol
    template: bool = True

    @property
    def mass(self) -> bool:
        """Whether a variant needs the attention accumulated over all queries."""
        return any(v.settings is not None and v.settings.policy.needs_mass for v in self.variants)


def _row(setup: Setup, task: Task, sample: Sample, variant: Variant, held: Held, **measured: Any) -> dict[str, Any]:
    return {
        "task": task.full_name,
        "sample": sample.id,
        "protocol": setup.protocol,
        "variant": variant.key,
        "method": variant.method,
        "preset": variant.preset,
        "level": variant.level,
        "match": variant.match,
        "matched": variant.matched.name if variant.matched else None,
        "corrected": variant.corrected,
        **asdict(held),
        **measured,
        "facts": dict(sample.facts),
    }


def measure(setup: Setup, task: Task, sample: Sample, write: Write) -> None:
    """Measure every variant on a sample and hand over each row as soon as it is known."""
    start = time.perf_counter()
    if isinstance(sample, Passage):
        held, values = fidelity.measure(setup.model, sample, setup.variants, setup.mass)
        seconds = round(time.perf_counter() - start, 2)
        for variant, own, figures in zip(setup.variants, held, values, strict=True):
            tokens = {"prompt_tokens": sample.prompt, "new_tokens": len(sample.token_ids) - sample.prompt}
            write(_row(setup, task, sample, variant, own, values=figures, **tokens, seconds=seconds))
        return
    prompt = prompt_of(sample, setup.tokenizer, setup.protocol, setup.template)
    with attend(setup.model):
        exact = prefill(setup.model, torch.tensor([prompt.context], device=setup.model.device), mass=setup.mass)
    caches, held = compress_all(exact, setup.variants, len(prompt.question) + sample.max_new_tokens + 1)
    logits = exact.logits
    del exact

    def done(index: int, token_ids: list[int]) -> None:
        text = setup.tokenizer.decode(token_ids, skip_special_tokens=True)
        write(
            _row(
                setup,
                task,
                sample,
                setup.variants[index],
                held[index],
                values={task.metric: task.score(text, sample)},
                pred=text,
                answers=list(sample.answers),
                prompt_tokens=len(prompt),
                new_tokens=len(token_ids),
                seconds=round(time.perf_counter() - start, 2),
            )
        )

    stops, not_first = stop_tokens(setup.model, setup.tokenizer, sample)
    answer(setup.model, caches, logits, prompt.question, sample.max_new_tokens, stops, not_first, done)


def check(setup: Setup) -> None:
    """Derive every variant from a prefill of a few tokens, so that whatever cannot work fails before the run."""
    with attend(setup.model):
        exact = prefill(setup.model, torch.tensor([[0, 1, 2, 3]], device=setup.model.device), mass=setup.mass)
    compress_all(exact, setup.variants, 1)
