"""The job of `momentkv report`: what runs have measured, as tables for the terminal, CSV, LaTeX and an HTML page."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

FORMATS = ("terminal", "csv", "latex", "html", "all")
NAMES = {"csv": "report.csv", "latex": "report.tex", "html": "report.html", "terminal": "report.txt"}


def _place(name: str, out: Path | None, folder: Path, only: bool) -> Path:
    """Where a format goes: `out` is a file if it alone is asked for and `out` is not a folder, otherwise a folder."""
    if out is None:
        return folder / NAMES[name]
    if only and not out.is_dir() and out.suffix:
        return out
    return out / NAMES[name]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _terminal_text(views: Sequence, every: bool) -> str:
    import io

    from rich.console import Console

    from momentkv.evals.report.tables import WIDTH, print_terminal

    text = io.StringIO()
    print_terminal(views, Console(file=text, width=WIDTH), every)
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def _writers(every: bool) -> dict[str, Callable[[Sequence], str]]:
    from momentkv.evals.report.html import html_text
    from momentkv.evals.report.latex import latex_text
    from momentkv.evals.report.tables import csv_text

    def terminal(views: Sequence) -> str:
        return _terminal_text(views, every)

    return {"csv": csv_text, "latex": latex_text, "html": html_text, "terminal": terminal}


def run(args: Namespace) -> int:
    """Print and write the report.

    Args:
        args: dirs: folders of runs. format: one of `FORMATS`; None is "all": the terminal's tables, and the three files.
            out: a file (with an ending, for a single format) or a folder; default: into the first of `dirs`. The
            terminal's tables go to a file only if it is named. tasks: names or globs of what to show, None for all;
            the terminal then shows intervals of all of it.

    Raises:
        ResultsError: a run that cannot be read; a task that matches nothing.
        ModuleNotFoundError: an extra is not installed.
    """
    from rich.console import Console

    from momentkv.evals.report.runs import views_of
    from momentkv.evals.report.tables import WIDTH, print_terminal

    tasks = getattr(args, "tasks", None)
    views = views_of(args.dirs, tasks)
    chosen = args.format or "all"
    out = Path(args.out) if args.out else None
    if chosen == "all" or (chosen == "terminal" and out is None):
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH
        print_terminal(views, console, bool(tasks))
    if chosen == "terminal" and out is None:
        return 0
    writers = _writers(bool(tasks))
    for name in ("csv", "latex", "html") if chosen == "all" else (chosen,):
        path = _place(name, out, Path(args.dirs[0]), chosen != "all")
        _write(path, writers[name](views))
        print(f"wrote {path}", file=sys.stderr)
    return 0
