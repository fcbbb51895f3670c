"""The job of `momentkv paper --table`: the tables of the MomentKV paper for any model, the published figures beside."""

import dataclasses
from argparse import Namespace
from pathlib import Path

from momentkv.analysis import published
from momentkv.analysis.table_layout import PaperTable, print_table, write_table
from momentkv.hf import models
from momentkv.hf.prompt import note

TABLES = {
    1: "LongBench by category",
    2: "RULER",
    3: "ablation on SnapKV",
    4: "order of the approximation, and latency",
    5: "bytes of the summary",
    6: "cost of a decode step",
    7: "the gap to the full cache",
    8: "MomentKV against Ada-KV by category",
}
OF_BOTH = (1, 2)  # tables that the paper has for both of its models; the others are of Llama
_FAMILY = {2: "ruler"}  # of the paper's tables of scores; the others are of LongBench


def number_of(table: str | int) -> int:
    """The table's number.

    Raises:
        ValueError: no such table.
    """
    if str(table) not in map(str, TABLES):
        valid = ", ".join(f"{number} ({about})" for number, about in TABLES.items())
        raise ValueError(f"table {table!r} is not one of the paper's; valid: {valid}")
    return int(table)


def heading_of(model: str, number: int) -> tuple[str, str]:
    """The paper's model whose figures stand beside ours, and the heading of its column."""
    theirs = published.model_of(model)
    theirs = theirs if theirs and number in OF_BOTH else published.LLAMA
    return theirs, f"published ({theirs})"


def _of_config(args: Namespace, number: int) -> tuple[PaperTable, int]:
    """Tables 5 and 6: no weights are loaded."""
    from momentkv.analysis import storage, table_complexity
    from momentkv.analysis.table_runs import budgets_of

    budgets = budgets_of(args, published.BUDGETS if number == 5 else (128, 1024))
    config = models.load_config(args.model, offline=args.offline, trust_remote_code=args.trust_remote_code)
    name = Path(args.model).name
    shape = storage.shape_of(config, args.dtype)
    if number == 5:
        return storage.storage_table(name, config, shape, budgets)
    return table_complexity.complexity_table(name, shape, budgets), 0


def _of_scores(args: Namespace, number: int) -> tuple[PaperTable, int]:
    """The tables that need an evaluation run."""
    from momentkv.analysis import latency, table_scores
    from momentkv.analysis.table_runs import run_for

    model, heading = heading_of(args.model, number)
    run, budgets, status = run_for(args, number)
    if number in (1, 2):
        paper = published.longbench if number == 1 else published.ruler
        name = "LongBench" if number == 1 else f"RULER, {args.length:,} tokens"
        title = f"Table {number}: {name if run.family == _FAMILY.get(number, 'longbench') else run.family}"
        table = table_scores.scores_table(
            number, title, run, budgets, lambda method, level: paper(model, method, level), heading
        )
    elif number == 3:
        table = table_scores.ablation_table(run, budgets, heading)
    elif number == 4:
        table = latency.order_table(args, run, budgets[0], heading)
    elif number == 7:
        table = table_scores.gap_table(run, budgets, model, heading)
    else:
        table = table_scores.category_table(run, 128 if 128 in budgets else budgets[0], heading)
    notes = [*_differences(args, number, run.family), *run.summary.notes]
    notes += [f"{len(run.summary.errors)} samples failed"] if run.summary.errors else []
    return dataclasses.replace(table, notes=(*table.notes, *notes, f"rows and intervals: {run.results.folder}")), status


def _differences(args: Namespace, number: int, family: str) -> list[str]:
    """What keeps our figures from being comparable with the published ones."""
    limits = {"--limit": args.limit, "--max-tokens": args.max_tokens, "--tasks": args.tasks}
    given = [f"{name} {','.join(v) if isinstance(v, list) else v}" for name, v in limits.items() if v]
    notes = [f"a subset ({', '.join(given)}): see the line of samples"] if given else []
    theirs = _FAMILY.get(number, "longbench")
    if family != theirs:
        notes.append(f"ours is of {family}, the published figures are of {theirs}: not comparable")
    if number == 2 and family == "ruler" and args.length != published.RULER_LENGTH:
        notes.append(f"ours has {args.length:,} tokens, the paper {published.RULER_LENGTH:,}: not comparable")
    if args.protocol != "aware":
        notes.append("ours is question-agnostic, the paper question-aware: not comparable")
    return notes


def run(args: Namespace) -> int:
    """Make one table: print it, and write OUT/table-<number>.csv and .md.

    Args:
        args: table: its number. model, out, and everything that `momentkv.evals.run.run` reads; methods are the
            table's own. Runs go to folders inside OUT and are gone on with; a complete one is only read.

    Returns:
        0, or 1 when samples failed or a cache is not of the size that it declares.

    Raises:
        ValueError: no such table, or what the evaluation raises for its arguments.
    """
    number = number_of(args.table)
    try:
        table, status = (_of_config if number in (5, 6) else _of_scores)(args, number)
    except ModuleNotFoundError as error:
        raise ValueError(f"table {number} needs {error.name}: pip install 'momentkv[eval]'") from error
    theirs = published.model_of(args.model)
    reference = heading_of(args.model, number)[0]
    notes = [*table.notes, *(f"paper: {remark}" for remark in published.INCONSISTENT.get(number, ()))]
    if theirs != reference and number not in (5, 6):
        notes.append(f"published figures are those of {reference}, another model: a reference, not a target")
    table = dataclasses.replace(table, title=f"{table.title} ({Path(args.model).name})", notes=tuple(notes))
    print_table(table)
    for path in write_table(table, Path(args.out)):
        note(f"wrote {path}")
    return status
