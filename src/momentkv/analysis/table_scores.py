"""Tables 1, 2, 3, 7 and 8: scores."""

from collections.abc import Callable, Sequence

from momentkv.analysis import published
from momentkv.analysis.table_layout import Cell, PaperTable, Value
from momentkv.analysis.table_runs import ABLATED, SYSTEM, Run
from momentkv.evals.results import Entry
from momentkv.evals.tasks.longbench_table import CATEGORIES

SHORT = dict(zip(CATEGORIES, ("SQA", "MQA", "Sum.", "Few-shot", "Synth.", "Code"), strict=True))
OFFICIAL = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}  # rows of LongBench's tasks; the others have 200
RULER_SAMPLES = 13 * 500
LIMITS = ("limit", "max_tokens", "tasks")


def official(task: str) -> int | None:
    """Samples of a task or average when nothing is left out."""
    family, _, name = task.partition("/")
    if family != "longbench":
        return RULER_SAMPLES if task == "ruler/avg" else None
    inside = CATEGORIES.get(name, [t for tasks in CATEGORIES.values() for t in tasks])
    return sum(OFFICIAL.get(t, 200) for t in inside)


def columns_of(run: Run) -> dict[str, str]:
    """Tasks by heading: the categories that the run has and the average."""
    here = {o["task"] for o in run.objects}
    inside = {short: f"longbench/{name}" for name, short in SHORT.items() if run.family == "longbench"}
    return {k: t for k, t in inside.items() if t in here} | {"Avg": run.score}


def counts(run: Run, columns: dict[str, str]) -> dict[str, Value]:
    """A line with the samples of every column, `12/200` where a benchmark has more."""
    line: dict[str, Value] = {"method": "samples"}
    for heading, task in columns.items():
        found = sorted({o["n"] for o in run.objects if o["task"] == task})
        text, whole = "-".join(map(str, dict.fromkeys(found[:1] + found[-1:]))), official(task)
        line[heading] = f"{text}/{whole}" if whole and found != [whole] else text or "-"
    return line


def equal(entry: Entry) -> str:
    """What a variant has in common with the others of its level."""
    return "-" if entry.method == "full" else entry.match


def scores_table(
    number: int, title: str, run: Run, budgets: Sequence[int], paper: Callable[[str, int], float | None], heading: str
) -> PaperTable:
    """Tables 1 and 2. paper: the published average of a method and budget. heading: of its column."""
    columns = columns_of(run)
    rows: list[dict[str, Value]] = [counts(run, columns)]
    for level in budgets:
        for entry in run.entries(level):
            if entry.method == "full" and level != budgets[0]:
                continue
            name = "full" if entry.method == "full" else entry.name
            row: dict[str, Value] = {"L": None if name == "full" else level, "method": name, "equal": equal(entry)}
            row |= {column: run.cell(task, entry) for column, task in columns.items()}
            row[heading] = paper(name, level) if entry.match == "tokens" else None
            rows.append(row)
    notes = [
        'lines with equal "bytes" are plain eviction with as many bytes as the corrected methods hold, summary '
        "included; the paper has none of these",
        "of the paper the averages are shown, not the categories",
    ]
    return PaperTable(number, title, ("L", "method", "equal", *columns, heading), rows, tuple(notes), ("Avg",))


def ablation_table(run: Run, budgets: Sequence[int], heading: str) -> PaperTable:
    """Table 3."""
    stages = ("SnapKV", "+ moment-informed eviction", "+ correction", "+ both")
    gain = f"{heading} gain"
    rows: list[dict[str, Value]] = [counts(run, {"score": run.score})]
    for level in budgets:
        base, first = run.entry(ABLATED[0], level), published.ablation(0, level)
        for stage, (method, label) in enumerate(zip(ABLATED, stages, strict=True)):
            entry, theirs = run.entry(method, level), published.ablation(stage, level)
            row: dict[str, Value] = {"L": level, "part": label, "method": method, "equal": "tokens"}
            row |= {"score": run.cell(run.score, entry), heading: theirs}
            if stage:
                row["gain"] = run.difference(run.score, entry, base)
                row[gain] = Cell(None if theirs is None or first is None else round(theirs - first, 2), sign="+")
            rows.append(row)
        for entry in [e for e in run.entries(level) if e.match == "bytes"]:
            row = {"L": level, "part": "the summary's bytes spent on tokens", "method": entry.name, "equal": "bytes"}
            row |= {"score": run.cell(run.score, entry), "gain": run.difference(run.score, entry, base)}
            rows.append(row)
    notes = (
        "gains are paired differences to SnapKV of the same budget",
        "with the moment score the paper's blocks of 4 take the place of SnapKV's pooling, so that step changes both; "
        "it stores the summary too, to score by",
    )
    columns = ("L", "part", "method", "equal", "score", "gain", heading, gain)
    return PaperTable(3, "Table 3: ablation on SnapKV", columns, rows, notes, ("score", "gain"))


def recovery(full: float | None, base: float | None, system: float | None) -> float | None:
    """Share of the gap between `base` and the full cache that `system` closes, per cent; None where there is no gap."""
    if full is None or base is None or system is None or full <= base:
        return None
    return 100 * (system - base) / (full - base)


def gap_table(run: Run, budgets: Sequence[int], model: str, heading: str) -> PaperTable:
    """Table 7."""
    theirs = [f"{heading} {what}" for what in ("delta", "recovery %", "delta, equal bytes")]
    rows: list[dict[str, Value]] = [counts(run, {"delta": run.score})]
    for level in budgets:
        full, base = run.entry("full", level), run.entry("adakv", level)
        for name in (SYSTEM, "momentkv"):
            entry, matched = run.entry(name, level), run.entry("adakv", level, "bytes")
            values = [run.cell(run.score, e).value for e in (full, base, entry)]
            row: dict[str, Value] = {"L": level, "method": name}
            row |= dict(zip(("full", "Ada-KV", "MomentKV"), map(Cell, values), strict=True))
            row["delta"] = run.difference(run.score, entry, base)
            row["recovery %"] = Cell(recovery(*values), digits=1)
            row["delta, equal bytes"] = run.difference(run.score, entry, matched)
            if name == SYSTEM:
                row |= dict(zip(theirs, published_gap(model, level), strict=True))
            rows.append(row)
    notes = (
        "recovery = (MomentKV - Ada-KV) / (full - Ada-KV); none where Ada-KV is not below the full cache",
        "delta, equal bytes: to Ada-KV with as many bytes as MomentKV holds, summary included; published: to the "
        "paper's own Ada-KV at L + d/2 + 1 tokens (d = 128), interpolated over log L, a 16-bit summary",
    )
    ours = ("L", "method", "full", "Ada-KV", "MomentKV", "delta", "recovery %", "delta, equal bytes")
    title = "Table 7: the gap to the full cache"
    return PaperTable(7, title, (*ours, *theirs), rows, notes, ("delta", "delta, equal bytes"))


def published_gap(model: str, level: int) -> tuple[Cell, Cell, Cell]:
    """Delta to Ada-KV, recovery and delta at equal bytes, computed from the paper's Table 1."""
    base, system = (published.longbench(model, name, level) for name in ("adakv", SYSTEM))
    more = published.interpolated(model, "adakv", level + published.LLAMA_SHAPE["d"] / 2 + 1)
    closed = recovery(published.FULL[model], base, system)
    delta = None if base is None or system is None else system - base
    fair = None if more is None or system is None else system - more
    return Cell(delta, sign="+"), Cell(closed, digits=1), Cell(fair, sign="+")


def category_table(run: Run, level: int, heading: str) -> PaperTable:
    """Table 8."""
    rows: list[dict[str, Value]] = []
    base, matched = run.entry("adakv", level), run.entry("adakv", level, "bytes")
    lead = Cell(published.CATEGORY_MEANS[SYSTEM] - published.CATEGORY_MEANS["adakv"], sign="+")
    for name in (SYSTEM, "momentkv"):
        entry = run.entry(name, level)
        for short, task in columns_of(run).items():
            row: dict[str, Value] = {"method": name, "category": short, "Ada-KV": run.cell(task, base)}
            row |= {"MomentKV": run.cell(task, entry), "delta": run.difference(task, entry, base)}
            row["delta, equal bytes"] = run.difference(task, entry, matched)
            row["samples"] = counts(run, {"n": task})["n"]
            row[heading] = lead if (name, short) == (SYSTEM, "Avg") and level == 128 else None
            rows.append(row)
    notes = ("of the paper's Table 8 the means of its categories are shown, not the categories",)
    columns = ("method", "category", "Ada-KV", "MomentKV", "delta", "delta, equal bytes", "samples", heading)
    title = f"Table 8: MomentKV against Ada-KV by category, L = {level}"
    return PaperTable(8, title, columns, rows, notes, ("delta", "delta, equal bytes"))
