"""The demo's figures, as a table or as JSON."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from momentkv.methods import settings_for

if TYPE_CHECKING:
    from momentkv.hf.demo import Row

_MIB = 2**20
_HEADINGS = (
    "KL", "NLL", "top-1", "answer\nfound", "tokens\nper head", "MiB\nheld", "summary\nMiB", "of the\nfull",
    "ms/\ntoken",
)  # fmt: skip


def figures(rows: "list[Row]", continuation: list[int], number: str) -> list[dict[str, Any]]:
    """Figures per row; the first row is the full cache, with which the others are compared.

    kl (nats) and nll (nats) are means per token of the continuation, agreement is the share of its tokens after which
    both caches predict the same one.
    """
    full = rows[0].log_probs
    targets = torch.tensor(continuation).unsqueeze(-1)
    table = []
    for row in rows:
        settings = settings_for(row.method)
        table.append(
            {
                "name": row.name,
                "method": row.method,
                "budget": row.budget,
                "settings": dataclasses.asdict(settings) if settings else None,
                "kl": float((full.exp() * (full - row.log_probs)).sum(-1).mean()),
                "nll": float(-row.log_probs.gather(-1, targets).mean()),
                "agreement": float((row.log_probs.argmax(-1) == full.argmax(-1)).float().mean()),
                "answer": row.answer,
                "found": number in row.answer,
                "tokens_per_head": row.report.tokens_per_head,
                "bytes": row.report.total,
                "summary_bytes": row.report.summary,
                "share_of_full": row.report.total / rows[0].report.total,
                "ms_per_token": row.ms_per_token,
            }
        )
    return table


def show(facts: dict[str, Any], rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print everything to stdout: one JSON document, or the table with the answers below it."""
    if as_json:
        print(json.dumps({**facts, "rows": rows}, indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width of its own
    console.print(
        f"{escape(facts['model'])} ({facts['dtype']}, {facts['device']}), {facts['document_tokens']:,} tokens of "
        f"{escape(facts['document'])}, budget {facts['budget']}"
    )
    console.print(_table(rows))
    console.print(
        f"KL(full || method) and NLL in nats per token and top-1 agreement with the full cache, over the text's next "
        f"{facts['continuation_tokens']} tokens. ms/token is the median decode step."
    )
    if any(row["summary_bytes"] for row in rows):
        console.print(
            "At equal tokens MomentKV holds more bytes than the others: its summary of what was evicted comes on top. "
            '"Equal bytes" pays for the summary out of the same bytes.'
        )
    console.print(f'\nHidden at {facts["needle_depth"]:.0%} of the text: "{facts["needle"]}"')
    console.print(f'Asked after it: "{facts["question"]}"')
    for row in rows:
        console.print(f"  {row['name']}: {escape(' '.join(row['answer'].split()) or '(nothing)')}")
    seconds = facts["seconds"]
    console.print(f"\nOne exact prefill: {seconds['prefill']:.0f} s. All methods: {seconds['methods']:.0f} s.")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("method")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['kl']:.3f}",
            f"{row['nll']:.3f}",
            f"{row['agreement']:.0%}",
            "yes" if row["found"] else "no",
            f"{row['tokens_per_head']:.0f}",
            f"{row['bytes'] / _MIB:.1f}",
            f"{row['summary_bytes'] / _MIB:.1f}",
            f"{row['share_of_full']:.1%}",
            f"{row['ms_per_token']:.0f}",
        )
    return table
