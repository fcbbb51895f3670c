"""Figure 2: how much eviction loses by layer, by budget and by length of the context."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from momentkv.analysis import draw
from momentkv.analysis.draw import Panel
from momentkv.analysis.figures import AXES, SPREAD, by_layer, counts, line, model_name, overall, pooled, write_csv
from momentkv.analysis.probe import Choice, Probe, check_choices, probe
from momentkv.analysis.texts import documents, passages_of
from momentkv.evals.run import progress

METHOD = "h2o"
BUDGETS = ("128", "256", "512", "1024")  # the paper's
SHORTEST = 1024  # tokens of the shortest context; each next one has twice as many
SHOWN = ("weight", "cosine", "gamma", "error", "parallel", "across")  # in the CSV

Found = dict[tuple[int, str], Probe]  # by length and budget


def lengths_up_to(most: int) -> list[int]:
    """1024, 2048, ... below `most`, and `most`."""
    lengths: list[int] = []
    while SHORTEST << len(lengths) < most:
        lengths.append(SHORTEST << len(lengths))
    return [*lengths, most]


def measure(model: Any, tokenizer: Any, args: Namespace) -> Found:
    """All budgets at all lengths, every length followed by the same text."""
    choices = [Choice(METHOD, budget) for budget in args.budgets or BUDGETS]
    check_choices(model, choices)
    texts, lengths = passages_of(args, tokenizer, 1), lengths_up_to(args.length)
    probes: dict[tuple[int, str], list[Probe]] = {}
    with progress(len(texts) * len(lengths)) as advance:
        for text in texts:
            for length in lengths:
                found = probe(text.read(model, length), choices)
                for choice, one in zip(choices, found, strict=True):
                    probes.setdefault((length, choice.budget), []).append(one)
                advance(f"{text.name}, {length:,} tokens")
    return {key: pooled(same) for key, same in probes.items()}


def rows_of(found: Found) -> list[tuple[Any, ...]]:
    """Rows of the CSV: each quantity over everything (layer "all"), and by layer."""
    rows: list[tuple[Any, ...]] = []
    for (length, budget), p in found.items():
        for quantity in SHOWN:
            rows.append((length, budget, p.tokens, "all", quantity, *overall(p, quantity)))
            layers = zip(p.layers, by_layer(p, quantity), strict=True)
            rows += [(length, budget, p.tokens, layer, quantity, *own) for layer, own in layers]
    return rows


def _panels(found: Found, most: int) -> list[list[Panel]]:
    lengths, budgets = [*dict.fromkeys(n for n, _ in found)], [*dict.fromkeys(b for _, b in found)]
    first = found[most, budgets[0]]
    layers, held = [float(i) for i in first.layers], [found[most, b].tokens for b in budgets]
    sizes = [(x, f"{x:.0f}") for x in held]

    def layer_panel(letter: str, quantity: str) -> Panel:
        own = by_layer(first, quantity)
        mean = overall(first, quantity).mean
        return Panel(
            f"({letter}) by layer, L = {budgets[0]}",
            "layer",
            AXES[quantity],
            [line("", layers, own)],
            flat=[(mean, f"mean {mean:.3f}")],
        )

    def budget_panel(letter: str, quantity: str) -> Panel:
        lines = [
            line(f"N = {n:,}", held, [overall(found[n, b], quantity) for b in budgets], i, n == most)
            for i, n in enumerate(reversed(lengths))
        ]
        return Panel(
            f"({letter}) by budget", "L, tokens per head", AXES[quantity], lines, log=True, ticks=sizes, zero=True
        )

    errors = [line(f"L = {b}", layers, by_layer(found[most, b], "error"), i, i == 0) for i, b in enumerate(budgets)]
    by_length = [
        line(name, list(map(float, lengths)), [overall(found[n, budgets[0]], quantity) for n in lengths], i)
        for i, (quantity, name) in enumerate((("error", "relative error"), ("weight", "$w_E$")))
    ]
    tokens = [(float(n), f"{n:,}") for n in lengths]
    return [
        [layer_panel(letter, quantity) for letter, quantity in zip("abcd", SHOWN, strict=False)],
        [
            budget_panel("e", "weight"),
            budget_panel("f", "error"),
            Panel("(g) by budget and layer", "layer", AXES["error"], errors),
            Panel(
                f"(h) by context, L = {budgets[0]}",
                "N, tokens of context",
                r"$w_E$ or relative error",
                by_length,
                log=True,
                ticks=tokens,
                zero=True,
            ),
        ],
    ]


def figure(model: Any, tokenizer: Any, args: Namespace) -> str:
    """Write figure-2 into `--out`; returns its caption."""
    found = measure(model, tokenizer, args)
    stem, most = Path(args.out) / "figure-2", args.length
    header = ("context", "budget", "tokens_per_head", "layer", "quantity", *SPREAD)
    write_csv(stem.with_name("figure-2.csv"), header, rows_of(found))
    first = found[most, next(iter(found))[1]]
    means = {name: overall(first, name).mean for name in SHOWN}
    caption = (
        f"{model_name(args)}, {METHOD}, N = {most:,} tokens of context unless said, of "
        f"{', '.join(documents(args.texts))}: what eviction to L tokens per head loses for the queries of the text "
        "that follows. Lines are means and bands the quartiles over heads and queries, in (e), (f) and (h) over layers "
        f"too: {counts(first)}. At the first budget: w_E {means['weight']:.4f}, cos(f_E, f_R) {means['cosine']:.3f}, "
        f"gamma {means['gamma']:.3f}, relative error {means['error']:.2%}. Largest relative residual of identities "
        f"(2)-(4): {max(p.residual for p in found.values()):.1g}."
    )
    draw.panels(stem, _panels(found, most), caption)
    return caption
