"""What is reported: one view of a run per protocol."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from momentkv.evals.results import Results, ResultsError, read_results
from momentkv.evals.summary import summarise


@dataclass(frozen=True)
class View:
    """One run and protocol. objects: those of its summary that were asked for. errors: samples without an answer."""

    results: Results
    protocol: str
    objects: list[dict[str, Any]]
    notes: tuple[str, ...]
    errors: list[dict[str, Any]]

    @property
    def model(self) -> str:
        """The last part of the model's folder or id."""
        return Path(str(self.results.spec.get("model", "unknown model"))).name

    @property
    def title(self) -> str:
        """Model and protocol, in words."""
        return f"{self.model}, question-{self.protocol}"

    @property
    def remarks(self) -> list[str]:
        """The notes, errors first."""
        if not self.errors:
            return list(self.notes)
        kinds = [str(error.get("kind") or "error") for error in self.errors]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return [f"{len(kinds)} error{'s' if len(kinds) > 1 else ''}: {counted}", *self.notes]


def views_of(folders: Sequence[str | Path], tasks: Sequence[str] | None = None) -> list[View]:
    """The runs in `folders`, each protocol apart.

    Args:
        tasks: names or globs of tasks and averages to show; None for all. Averages are over all tasks all the same.

    Raises:
        ResultsError: see `read_results`; a name that matches nothing.
    """
    views = []
    for folder in {Path(f).resolve(): Path(f) for f in folders}.values():
        results = read_results(folder)
        summary = summarise(results)
        for protocol in dict.fromkeys(o["protocol"] for o in summary.objects):
            mine = [o for o in summary.objects if o["protocol"] == protocol and _wanted(o["task"], tasks)]
            views.append(View(results, protocol, mine, summary.notes, summary.errors))
    if not views:
        raise ResultsError(f"no figures in {', '.join(repr(str(f)) for f in folders)}")
    if not any(view.objects for view in views):
        known = dict.fromkeys(row["task"] for view in views for row in view.results.rows)
        raise ResultsError(f"no task matches {', '.join(map(repr, tasks or ()))}; there are: {', '.join(known)}")
    return [view for view in views if view.objects]


def _wanted(task: str, tasks: Sequence[str] | None) -> bool:
    return not tasks or any(fnmatch.fnmatch(task, t) or task.startswith(f"{t}/") for t in tasks)
