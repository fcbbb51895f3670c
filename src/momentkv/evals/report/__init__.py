"""The job of `momentkv report`: what runs have measured, as tables for the terminal, CSV, LaTeX and an HTML page."""

import io
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from momentkv.evals.report.runs import View

FORMATS = ("all", "terminal", "csv", "latex", "html")
NAMES = {"csv": "report.csv", "latex": "report.tex", "html": "report.html", "terminal": "report.txt"}


def show(folders: Sequence[str | Path], tasks: Sequence[str] | None = None) -> None:
    """Print the tables of the runs in `folders` to stdout.

    Raises:
        ResultsError: a run that cannot be read; a task that matches nothing.
        ModuleNotFoundError: an extra is not installed.
    """
    from momentkv.evals.report.runs import views_of

    _print(views_of(folders, tasks), bool(tasks))


def _print(views: "Sequence[View]", every: bool) -> None:
    from rich.console import Console

    from momentkv.evals.report.tables import WIDTH, print_terminal

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    print_terminal(views, console, every)


def _terminal_text(views: "Sequence[View]", every: bool) -> str:
    from rich.console import Console

    from momentkv.evals.report.tables import WIDTH, print_terminal

    text = io.StringIO()
    print_terminal(views, Console(file=text, width=WIDTH), every)
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def _writer(name: str, every: bool) -> "Callable[[Sequence[View]], str]":
    """Imported one by one: a format needs only its own libraries."""
    if name == "csv":
        from momentkv.evals.report.tables import csv_text as writer
    elif name == "latex":
        from momentkv.evals.report.latex import latex_text as writer
    elif name == "html":
        from momentkv.evals.report.html import html_text as writer
    else:
        return lambda views: _terminal_text(views, every)
    return writer


def _path(name: str, out: Path | None, folder: Path, alone: bool) -> Path:
    if out is None:
        return folder / NAMES[name]
    is_file = alone and not out.is_dir() and out.suffix != ""
    return out if is_file else out / NAMES[name]


def run(args: Namespace) -> int:
    """Run `momentkv report`.

    Args:
        args: dirs: folders of runs. format: one of `FORMATS`; "all" prints the tables and writes the three files. out:
            a folder, or for a single format a file (it has an ending); default: the first of `dirs`. With it, the
            terminal's tables are written too when they alone are asked for. tasks: names or globs of what to show,
            None for all; with it the terminal shows the intervals of everything that is left.

    Raises:
        ResultsError: a run that cannot be read; a task that matches nothing.
        ModuleNotFoundError: an extra is not installed.
    """
    from momentkv.evals.report.runs import views_of
    from momentkv.evals.spec import write_atomically

    every = bool(args.tasks)
    views = views_of(args.dirs, args.tasks)
    out = Path(args.out) if args.out else None
    if args.format == "all" or (args.format == "terminal" and out is None):
        _print(views, every)
    if args.format == "terminal" and out is None:
        return 0
    for name in ("csv", "latex", "html") if args.format == "all" else (args.format,):
        path = _path(name, out, Path(args.dirs[0]), args.format != "all")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _writer(name, every)(views))
        print(f"wrote {path}", file=sys.stderr)
    return 0
