"""Tasks by name, family or glob."""

import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path

from momentkv.evals.task import Task, TaskError

FAMILIES = ("longbench", "longbench-e", "ruler", "niah", "fidelity")


def _tasks(texts: Sequence[Path]) -> Iterator[Task]:
    from momentkv.evals.tasks.fidelity import Fidelity
    from momentkv.evals.tasks.longbench import longbench_tasks
    from momentkv.evals.tasks.niah import niah_tasks
    from momentkv.evals.tasks.ruler import ruler_tasks

    yield from longbench_tasks()
    yield from ruler_tasks()
    yield from niah_tasks()
    stems = [path.stem for path in texts]
    if repeated := {stem for stem in stems if stems.count(stem) > 1}:
        raise TaskError(f"two texts are named {sorted(repeated)[0]!r}: tasks are named by their files, so rename one")
    yield from map(Fidelity, texts)


def tasks_of(names: Sequence[str], texts: Sequence[Path] = ()) -> list[Task]:
    """Tasks in a fixed order, each once.

    Args:
        names: "ruler/niah_single_1", a family ("ruler"), a glob ("longbench/*qa") or "niah". texts: for `fidelity`.

    Raises:
        TaskError: a name that matches nothing, with what is valid.
    """
    known = {task.full_name: task for task in _tasks(texts)}
    chosen: dict[str, Task] = {}
    for name in names:
        found = [full for full in known if full.startswith(f"{name}/") or fnmatch.fnmatch(full, name)]
        if not found and name.partition("/")[0] == "fidelity":
            raise TaskError(f"task {name!r}: no such text; name the files with --texts FILE...")
        if not found:
            family = name.partition("/")[0]
            inside = [full for full in known if full.startswith(f"{family}/")]
            raise TaskError(f"task {name!r} is not known; valid: {', '.join(inside or FAMILIES)}")
        chosen |= {full: known[full] for full in found}
    return list(chosen.values())
