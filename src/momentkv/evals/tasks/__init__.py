"""Tasks by name, family or glob."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from momentkv.evals.task import Task, TaskError

FAMILIES = ("longbench", "longbench-e", "ruler", "niah", "fidelity")


def _family(name: str, texts: Sequence[Path]) -> Sequence[Task]:
    """All tasks of one family; what it needs is imported only for it."""
    if name.startswith("longbench"):
        from momentkv.evals.tasks.longbench import longbench_tasks

        return [task for task in longbench_tasks() if task.family == name]
    if name == "ruler":
        from momentkv.evals.tasks.ruler import ruler_tasks

        return ruler_tasks()
    if name == "niah":
        from momentkv.evals.tasks.niah import niah_tasks

        return niah_tasks()
    from momentkv.evals.tasks.fidelity import Fidelity

    stems = [path.stem for path in texts]
    if repeated := {stem for stem in stems if stems.count(stem) > 1}:
        raise TaskError(f"two texts are named {sorted(repeated)[0]!r}: tasks are named by their files, so rename one")
    return [Fidelity(path) for path in texts]


def tasks_of(names: Sequence[str], texts: Sequence[Path] = ()) -> list[Task]:
    """Tasks in a fixed order, each once.

    Args:
        names: "ruler/niah_single_1", a family ("ruler"), a glob ("ruler/niah*") or "niah". texts: for `fidelity`.

    Raises:
        TaskError: a name that matches nothing, with what is valid.
    """
    chosen: dict[str, Task] = {}
    for name in names:
        families = [f for f in FAMILIES if fnmatch.fnmatch(f, name.partition("/")[0])]
        if not families:
            raise TaskError(f"task {name!r} is not known; valid families: {', '.join(FAMILIES)}")
        known = {task.full_name: task for family in families for task in _family(family, texts)}
        found = [full for full in known if full.partition("/")[0] == name or fnmatch.fnmatch(full, name)]
        if not found and families == ["fidelity"]:
            raise TaskError(f"task {name!r}: no such text; name the files with --texts FILE...")
        if not found:
            raise TaskError(f"task {name!r} is not known; valid: {', '.join(known)}")
        chosen |= {full: known[full] for full in found}
    return list(chosen.values())
