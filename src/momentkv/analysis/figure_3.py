"""Figure 3: the error of the attention output with and without the correction, by sample and by layer."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from momentkv.analysis import draw
from momentkv.analysis.draw import Line, Panel
from momentkv.analysis.figures import (
    AXES,
    SPREAD,
    by_layer,
    counts,
    line,
    model_name,
    one_budget,
    overall,
    pooled,
    write_csv,
)
from momentkv.analysis.probe import Choice, Probe, check_choices, probe
from momentkv.analysis.texts import Passage, Question, passages_of, questions_of
from momentkv.evals.run import progress

PAIRS = (("h2o", "momentkv:paper"), ("adakv", "momentkv"))  # without a correction, and with one
CORRECTED = tuple(method for _, method in PAIRS)
METHODS = tuple(method for pair in PAIRS for method in pair)
TASKS = ("longbench/qasper",)  # the paper's
PASSAGES = 4  # of each text, where no task is asked for
SHOWN = ("weight", "cosine", "error", "corrected", "estimate_cosine")  # in the CSV

Found = dict[str, list[Probe]]  # by method, one per sample


def samples_of(args: Namespace, tokenizer: Any) -> Sequence[Passage | Question]:
    """Those of `--tasks` (Qasper where only `--data` is given), or passages of `--texts`."""
    if args.tasks or args.data:
        return questions_of(args, tokenizer, args.tasks or TASKS)
    return passages_of(args, tokenizer, PASSAGES)


def measure(model: Any, samples: Sequence[Passage | Question], budget: str) -> Found:
    """Every method on every sample."""
    choices = [Choice(method, budget) for method in METHODS]
    found: Found = {method: [] for method in METHODS}
    with progress(len(samples)) as advance:
        for sample in samples:
            for method, one in zip(METHODS, probe(sample.read(model), choices), strict=True):
                found[method].append(one)
            advance(sample.name)
    return found


def rows_of(names: Sequence[str], found: Found) -> list[tuple[Any, ...]]:
    """Rows of the CSV: each quantity by sample (layer "all") and by layer (sample "all")."""
    rows: list[tuple[Any, ...]] = []
    for method, probes in found.items():
        for quantity in SHOWN if method in CORRECTED else SHOWN[:-1]:
            for name, p in zip(names, probes, strict=True):
                rows.append((method, name, "all", quantity, *overall(p, quantity)))
            both = pooled(probes)
            rows.append((method, "all", "all", quantity, *overall(both, quantity)))
            layers = zip(both.layers, by_layer(both, quantity), strict=True)
            rows += [(method, "all", layer, quantity, *own) for layer, own in layers]
    return rows


def _panels(found: Found) -> list[list[Panel]]:
    both = {method: pooled(probes) for method, probes in found.items()}
    layers = [float(i) for i in both[METHODS[0]].layers]
    numbers = [float(i + 1) for i in range(len(found[METHODS[0]]))]
    samples = [
        Line(m, numbers, [overall(p, "corrected").mean for p in found[m]], style=i, joined=False)
        for i, m in enumerate(METHODS)
    ]

    def pair(letter: str, plain: str, corrected: str) -> Panel:
        lower = 1 - overall(both[corrected], "corrected").mean / overall(both[plain], "corrected").mean
        lines = [
            line(plain, layers, by_layer(both[plain], "corrected"), METHODS.index(plain)),
            line(corrected, layers, by_layer(both[corrected], "corrected"), METHODS.index(corrected)),
        ]
        if plain != "adakv":  # whose selection `momentkv` has: uncorrected they are the same
            lines.append(line(f"{corrected}, uncorrected", layers, by_layer(both[corrected], "error"), 4, band=False))
        return Panel(f"({letter}) by layer, mean {-lower:+.1%}", "layer", AXES["corrected"], lines)

    cosines = [
        line(method, layers, by_layer(both[method], "estimate_cosine"), METHODS.index(method)) for method in CORRECTED
    ]
    ticks = [(x, f"{x:.0f}") for x in numbers] if len(numbers) <= 12 else []
    return [
        [Panel("(a) by sample", "sample", AXES["corrected"], samples, ticks=ticks, zero=True), pair("b", *PAIRS[0])],
        [pair("c", *PAIRS[1]), Panel("(d) direction of the estimate", "layer", AXES["estimate_cosine"], cosines)],
    ]


def figure(model: Any, tokenizer: Any, args: Namespace) -> str:
    """Write figure-3 into `--out`; returns its caption."""
    budget = one_budget(args)
    check_choices(model, [Choice(method, budget) for method in METHODS])
    samples = samples_of(args, tokenizer)
    found = measure(model, samples, budget)
    stem = Path(args.out) / "figure-3"
    write_csv(
        stem.with_name("figure-3.csv"),
        ("method", "sample", "layer", "quantity", *SPREAD),
        rows_of([sample.name for sample in samples], found),
    )
    both = {method: pooled(probes) for method, probes in found.items()}
    errors = ", ".join(f"{method} {overall(both[method], 'corrected').mean:.4f}" for method in METHODS)
    cosines = ", ".join(f"{m} {overall(both[m], 'estimate_cosine').mean:.3f}" for m in CORRECTED)
    lengths = sorted(map(len, samples))
    span = " to ".join(dict.fromkeys(f"{n:,}" for n in (lengths[0], lengths[-1])))
    sources = ", ".join(dict.fromkeys(sample.source for sample in samples))
    whose = "the model's own answers" if isinstance(samples[0], Question) else "the text that follows"
    caption = (
        f"{model_name(args)}, L = {budget}, {len(samples)} samples of {sources}, N = {span} tokens; queries of "
        f"{whose}. Lines are means and bands the quartiles over heads and queries: {counts(both[METHODS[0]])}. Mean "
        f"relative error: {errors}; the selection of momentkv:paper without its correction "
        f"{overall(both['momentkv:paper'], 'error').mean:.4f}. Mean cos(f_E, estimate): {cosines}."
    )
    draw.panels(stem, _panels(found), caption)
    return caption
