"""The paper's tables: its published figures, the bytes and operations in closed form, and tables of made-up runs."""

import csv
import json
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import build, prompt, real_model
from helpers import compressed, forward
from momentkv.analysis import latency, published, storage, tables
from momentkv.analysis import table_complexity as complexity
from momentkv.analysis.table_layout import Cell, PaperTable, csv_text, markdown_text
from momentkv.analysis.table_runs import ABLATED, ORDERED, SYSTEM, Run
from momentkv.analysis.table_scores import ablation_table, category_table, gap_table, recovery, scores_table
from momentkv.decode import decode
from momentkv.evals.task import TaskError
from momentkv.evals.tasks.longbench_table import TASKS
from momentkv.evals.variants import variants_of
from momentkv.hf.cache import MomentCache
from synthetic_run import variant, write_run


def options(tmp_path, table, model="demo", **changes) -> Namespace:
    """The command line's arguments."""
    given = {"tasks": None, "limit": None, "budgets": None, "length": 16384, "max_length": 31500, "max_tokens": None}
    given |= {"texts": [], "data": None, "protocol": "aware", "follow": 128, "seed": 42, "no_chat_template": False}
    given |= {"device": "cpu", "dtype": "float32", "offline": True, "trust_remote_code": False, "methods": ["all"]}
    return Namespace(**({"table": table, "model": model, "out": str(tmp_path / "paper")} | given | changes))


# the paper's own figures


def test_what_the_paper_computes_from_its_figures():
    for model in (published.LLAMA, published.QWEN):
        for budget, row in published.LONGBENCH[model].items():
            assert row[-1] == max(row) and row[-2] >= max(row[:-2]), (model, budget)  # MomentKV first, then Ada-KV
    leads = {b: row[-1] - row[-2] for b, row in published.LONGBENCH[published.LLAMA].items()}
    assert leads == pytest.approx({128: 1.35, 256: 0.80, 512: 0.72, 1024: 0.59})
    assert [round(published.RULER[m][-1] - published.RULER[m][-2], 1) for m in published.RULER] == [3.4, 3.5]
    assert 46.38 / published.FULL[published.LLAMA] == pytest.approx(0.941, abs=5e-4)
    none, first, full = (published.ORDERS[o][1] for o in ("none", "first", "full"))
    assert first - none == pytest.approx(1.6) and 1 - first / full > 0.65
    for budget, share in published.RECOVERY.items():
        base, system = (published.longbench(published.LLAMA, m, budget) for m in ("adakv", SYSTEM))
        assert recovery(published.FULL[published.LLAMA], base, system) == pytest.approx(share, abs=0.05)


def test_what_does_not_fit_together_is_as_the_notes_say():
    llama = published.LLAMA
    for budget in published.ABLATION_BASE:
        assert published.ablation(0, budget) == published.longbench(llama, "snapkv", budget)
        assert published.ablation(3, budget) == published.longbench(llama, SYSTEM, budget)
    ratios = [round(nc / mi, 1) for mi, nc, _ in published.ABLATION_GAINS.values()]
    assert all(str(x) in published.INCONSISTENT[3][1] for x in ratios)
    assert published.ablation(2, 128) == 45.62 and "45.62" in published.INCONSISTENT[4][0]
    assert published.ORDERS["first"][0] == published.longbench(llama, SYSTEM, 128)
    means = published.CATEGORY_MEANS
    assert means[SYSTEM] - means["adakv"] == pytest.approx(1.26)
    assert means[SYSTEM] > published.longbench(llama, SYSTEM, 128) + 5
    fair = [
        round(published.longbench(llama, SYSTEM, b) - published.interpolated(llama, "adakv", b + 65), 2)
        for b in (128, 256, 512)
    ]
    assert fair == [0.31, 0.55, 0.59] and published.interpolated(llama, "adakv", 1024 + 65) is None
    assert published.interpolated(llama, "adakv", 256) == published.longbench(llama, "adakv", 256)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", published.LLAMA),
        ("/models/meta-llama-3.1-8b-instruct", published.LLAMA),
        ("Qwen/Qwen3-4B-Instruct-2507", published.QWEN),
        ("Qwen/Qwen3-4B", None),
        ("someone/Llama-3.1-8B-Instruct-tuned", None),
        ("demo", None),
    ],
)
def test_the_paper_has_two_models(name, model):
    assert published.model_of(name) == model
    assert tables.heading_of(name, 1) == (model or published.LLAMA, f"published ({model or published.LLAMA})")
    assert tables.heading_of(name, 3)[0] == published.LLAMA  # the paper's other tables are of Llama alone


# bytes and operations


def test_llama_by_the_arithmetic():
    shape = storage.LLAMA
    assert shape.numbers() == 128**2 + 2 * 128 + 1 and 2 * shape.numbers() / shape.pair == pytest.approx(65, abs=0.01)
    megabytes = 2 * shape.all_heads * shape.numbers() / storage.MB
    assert round(megabytes, 1) == published.SUMMARY_MB[1] == 8.5
    assert round(100e6 * megabytes / shape.retained(128), 1) == 50.8
    assert round(100e6 * megabytes / shape.retained(1024), 1) == 6.3 < published.SUMMARY_SHARE
    assert round(shape.all_heads * shape.numbers() / 2**20, 2) == 4.06
    assert 4 * storage.Shape(1, 1, 1, 64, 64, torch.float32).numbers() // 512 == 33


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    ("settings", "moments", "order"),
    [({}, "centred", "first"), ({"moments": "raw-float16"}, "raw-float16", "first"), ({}, "centred", "zeroth")],
)
def test_the_closed_form_is_what_a_cache_reports_after_a_real_prompt(family, settings, moments, order):
    model = build(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers with a window of their own
        shape = storage.shape_of(model.config, "float32")
        method = "momentkv:paper" if order == "first" else "snapkv"
        cache = compressed(model, 50, method, **settings, **({} if order == "first" else {"correction": order}))
        made_up = storage.made_up_cache(model.config, shape, 50, moments=moments)
    forward(model, prompt(1, 120), cache)
    assert storage.reported(cache.report()) == storage.declared(shape, 50, moments, order)
    if order == "first":
        assert storage.reported(made_up.report()) == storage.reported(cache.report())
        assert made_up.report().tokens_per_head == 50


def test_a_wrong_closed_form_is_shown(tiny, monkeypatch):
    shape = storage.shape_of(tiny.config, "float32")
    table, status = storage.storage_table("tiny", tiny.config, shape, [50])
    assert status == 0 and [row.get("as declared") for row in table.rows[:2]] == ["yes", "yes"]
    monkeypatch.setattr(storage.Shape, "numbers", lambda self, order="first": 7)
    table, status = storage.storage_table("tiny", tiny.config, shape, [50])
    assert status == 1 and table.rows[0]["as declared"].startswith("NO")


@pytest.mark.parametrize(
    ("method", "changes"),
    [("snapkv", {}), ("snapkv", {"correction": "first"}), ("momentkv:paper", {"allocation": "uniform"})],
)
def test_the_operations_counted_are_those_of_a_decode_step(tiny, method, changes):
    cache, shape = compressed(tiny, 50, method, **changes), storage.shape_of(tiny.config, "float32")
    forward(tiny, prompt(1, 120), cache)
    state = cache.moment_layers[0].state
    a, k = torch.randn(1, shape.heads, shape.group, 1, shape.d), torch.randn(1, shape.heads, shape.d)
    counter = FlopCounterMode(display=False)
    with counter:  # of the matrix products alone: neither scores without residuals nor the update are any
        decode(state, cache.settings, a, k, k, torch.tensor([True]), shape.d**-0.5)
    expected = complexity.attend_operations(shape, 50)
    expected += complexity.residual_operations(shape, 50) if method == "momentkv:paper" else 0
    expected += complexity.correct_operations(shape) if cache.settings.correction == "first" else 0
    assert counter.get_total_flops() == 2 * shape.heads * expected


def test_every_line_of_the_cost_table_is_counted(tiny):
    shape = storage.shape_of(tiny.config, "float32")
    table = complexity.complexity_table("tiny", shape, [128, 1024])
    assert [row["published order"] for row in table.rows] == list(
        published.COSTS[k]
        for k in (
            "attend",
            "evict, baselines",
            "evict, MomentKV",
            "update",
            "correct",
            "storage, baselines",
            "storage, MomentKV",
        )
    )
    assert table.rows[2]["L = 128"] == 129 * 16 * 16 and table.rows[6]["L = 1024"] == 4 * 1025 + 4 * (256 + 33)


# tables of made-up runs

SCORES = {  # by variant: scores of two samples of qasper (single-doc QA), of two of hotpotqa (multi-doc QA)
    ("full", None, None): ([1.0, 0.8], [0.5, 0.7]),
    ("snapkv", None, None): ([0.5, 0.5], [0.2, 0.2]),
    ("adakv", None, None): ([0.6, 0.6], [0.3, 0.3]),
    ("adakv", None, SYSTEM): ([0.7, 0.6], [0.4, 0.5]),
    ("momentkv", "paper", None): ([0.9, 0.6], [0.4, 0.4]),
    ("momentkv", None, None): ([0.6, 0.6], [0.2, 0.3]),
}


def rows_of(scores, level="128", tasks=("longbench/qasper", "longbench/hotpotqa")):
    rows = []
    for (method, preset, matched), values in scores.items():
        fields = variant(method, preset, level, matched, corrected=method == "momentkv" or "correction" in method)
        for task, own in zip(tasks, values, strict=True):
            for i, value in enumerate(own):
                row = {"task": task, "sample": f"{i}", "protocol": "aware", "facts": {}}
                rows.append({**row, **fields, "values": {"f1": value}})
    return rows


@pytest.fixture
def made_up(tmp_path):
    return Run(write_run(tmp_path / "run", rows_of(SCORES)), "aware")


def line(table, **wanted):
    found = [row for row in table.rows if all(row.get(name) == value for name, value in wanted.items())]
    assert len(found) == 1, (wanted, found)
    return found[0]


def value(cell: Cell) -> float:
    assert cell.value is not None
    return round(cell.value, 6)


def test_table_1_by_hand(made_up):
    paper = lambda method, level: published.longbench(published.LLAMA, method, level)  # noqa: E731
    table = scores_table(1, "Table 1", made_up, [128], paper, "published")
    assert table.columns == ("L", "method", "equal", "SQA", "MQA", "Avg", "published")
    samples = line(table, method="samples")
    assert (samples["SQA"], samples["MQA"], samples["Avg"]) == ("2/550", "2/600", "4/3750")
    system = line(table, method=SYSTEM)
    assert [value(system[c]) for c in ("SQA", "MQA", "Avg")] == [75, 40, 57.5]
    assert system["published"] == 46.38 and system["SQA"].n == 2 and system["Avg"].n == 4
    assert system["SQA"].low == 60 and system["SQA"].high == 90
    assert value(line(table, method="adakv", equal="tokens")["Avg"]) == 45
    equal = line(table, method="adakv", equal="bytes")
    assert value(equal["Avg"]) == 55 and equal["published"] is None
    full = line(table, method="full")
    assert value(full["Avg"]) == 75 and full["published"] == 49.29 and full["L"] is None
    assert line(table, method="momentkv")["published"] is None


def test_table_7_by_hand(made_up):
    table = gap_table(made_up, [128], published.LLAMA, "published")
    system, ours = line(table, method=SYSTEM), line(table, method="momentkv")
    assert value(system["delta"]) == 12.5 and value(system["recovery %"]) == round(100 * 12.5 / 30, 6)
    assert value(system["delta, equal bytes"]) == 2.5 and system["delta"].n == 4
    # qasper's paired differences are 0.3 and 0, hotpotqa's 0.1 and 0.1: half of each mean
    assert (round(system["delta"].low, 6), round(system["delta"].high, 6)) == (5, 20)
    assert value(ours["delta"]) == -2.5 and value(ours["recovery %"]) == round(-100 * 2.5 / 30, 6)
    assert value(system["published delta"]) == 1.35 and round(system["published recovery %"].value, 1) == 31.7
    assert round(system["published delta, equal bytes"].value, 2) == 0.31 and "published delta" not in ours


def test_table_8_by_hand(made_up):
    table = category_table(made_up, 128, "published")
    wanted = {"SQA": (60, 75, 15, 10), "MQA": (30, 40, 10, -5), "Avg": (45, 57.5, 12.5, 2.5)}
    for category, figures in wanted.items():
        row = line(table, method=SYSTEM, category=category)
        assert [value(row[c]) for c in ("Ada-KV", "MomentKV", "delta", "delta, equal bytes")] == list(figures)
        assert row["samples"] == {"SQA": "2/550", "MQA": "2/600", "Avg": "4/3750"}[category]
    assert value(line(table, method=SYSTEM, category="Avg")["published"]) == 1.26
    assert line(table, method=SYSTEM, category="SQA")["published"] is None


def test_table_3_by_hand(tmp_path):
    scores = {(m, None, None): ([x, x], [x, x + 0.1]) for m, x in zip(ABLATED, (0.2, 0.25, 0.3, 0.5), strict=True)}
    folder = write_run(tmp_path / "run", rows_of({("full", None, None): ([1, 1], [1, 1])} | scores))
    table = ablation_table(Run(folder, "aware"), [128], "published")
    gains = [value(line(table, method=m)["gain"]) for m in ABLATED[1:]]
    assert gains == [5, 10, 30] and value(line(table, method="snapkv")["score"]) == 22.5
    assert [line(table, method=m)["published"] for m in ABLATED] == [43.21, 43.78, 45.62, 46.38]
    assert [value(line(table, method=m)["published gain"]) for m in ABLATED[1:]] == [0.57, 2.41, 3.17]
    settings = [v.settings for v in variants_of(ABLATED, ["128"]) if v.method in ABLATED and v.match == "tokens"]
    assert [(s.score, s.correction) for s in settings] == [
        ("snapkv", "off"),
        ("moment", "off"),
        ("snapkv", "first"),
        ("moment", "first"),
    ]
    paper = next(v.settings for v in variants_of([SYSTEM], ["128"]) if v.preset == "paper")
    assert (settings[3].rounds, settings[3].block) == (paper.rounds, paper.block)


def test_a_difference_is_over_the_samples_that_all_variants_have(tmp_path):
    rows = [
        r for r in rows_of(SCORES) if not (r["method"] == "snapkv" and r["sample"] == "0" and "qasper" in r["task"])
    ]
    run = Run(write_run(tmp_path / "run", rows), "aware")
    found = run.difference("longbench/avg", run.entry(SYSTEM, 128), run.entry("adakv", 128))
    assert value(found) == 5 and found.n == 3 and found.low is None  # one sample of qasper is left: no spread
    assert run.difference("longbench/avg", run.entry("h2o", 128), run.entry("adakv", 128)) == Cell(None)


def test_there_is_nothing_to_recover_without_a_gap(tmp_path):
    assert (
        recovery(50.0, 50.0, 60.0) is None and recovery(40.0, 50.0, 60.0) is None and recovery(None, 1.0, 2.0) is None
    )
    assert recovery(60.0, 50.0, 55.0) == 50
    level = {key: SCORES["adakv", None, None] if key[0] in ("full", "adakv") else own for key, own in SCORES.items()}
    run = Run(write_run(tmp_path / "run", rows_of(level)), "aware")
    row = line(gap_table(run, [128], published.LLAMA, "published"), method=SYSTEM)
    assert row["recovery %"].value is None and value(row["delta"]) == 12.5


def test_rows_of_another_protocol_do_not_count(tmp_path):
    other = [row | {"protocol": "agnostic", "values": {"f1": 0.0}} for row in rows_of(SCORES)]
    run = Run(write_run(tmp_path / "run", rows_of(SCORES) + other), "aware")
    assert value(run.cell("longbench/avg", run.entry(SYSTEM, 128))) == 57.5


# how tables are written


def test_csv_has_the_intervals_and_markdown_shows_what_was_asked_for():
    rows = [{"a": "x|y", "b": Cell(1.234, 1.0, 2.0, 7), "c": 1234}, {"a": "z", "b": Cell(None), "c": None}]
    table = PaperTable(9, "Title", ("a", "b", "c"), rows, ("a note",), ("b",))
    assert csv_text(table).splitlines() == ["table,a,b,b low,b high,b n,c", "9,x|y,1.234,1.0,2.0,7,1234", "9,z,,,,,"]
    assert r"| x\|y | 1.23 [1.00, 2.00] | 1,234 |" in markdown_text(table) and "| z | - | - |" in markdown_text(table)
    assert markdown_text(table).endswith("\n* a note\n")
    assert Cell(1.234, 1.0, 2.0, sign="+").text(False) == "+1.23"


# the job


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("9", {}, "table '9' is not one of the paper's; valid: 1 "),
        ("one", {}, "'one'"),
        (5, {"budgets": ["4MiB"]}, "tokens per head"),
        (1, {"tasks": ["fidelity"], "texts": ["a.txt"]}, "fidelity.*valid: longbench"),
        (3, {"tasks": ["niah", "ruler/vt"]}, "one family"),
        (2, {"tasks": ["rulr"]}, "rulr"),
        (7, {"budgets": ["0.1"]}, "0.1"),
        (4, {"budgets": ["128", "256"]}, "one budget"),
    ],
)
def test_bad_input_is_refused_before_any_work(tmp_path, table, changes, message):
    with pytest.raises((ValueError, TaskError), match=message):
        tables.run(options(tmp_path, table, model="/nonexistent/model", **changes))
    assert not (tmp_path / "paper").exists()


def lines_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_storage_and_cost_of_a_real_model(tmp_path, capsys):
    model = str(real_model("smollm2"))
    assert tables.run(options(tmp_path, 5, model, budgets=["128"])) == 0
    assert tables.run(options(tmp_path, "6", model)) == 0
    shown = capsys.readouterr().out
    assert "8.5 MB" in shown and "50.8" in shown and "published" in shown
    rows = lines_of(tmp_path / "paper" / "table-5.csv")
    own = next(r for r in rows if r["summary"].startswith("fp32") and r["as declared"])
    assert (own["te"], own["report: summary"]) == ("33.0078125", str(90 * 16900)) and own["as declared"] == "yes"
    claimed = [r for r in rows if r["published share %"]]
    assert [(r["model"], r["L"], round(float(r["share %"]), 1)) for r in claimed] == [(published.LLAMA, "128", 50.8)]
    assert (tmp_path / "paper" / "table-6.md").read_text().startswith("## Table 6")


def small_data(folder: Path) -> Path:
    """Two rows of a LongBench task."""
    (folder / "longbench").mkdir(parents=True)
    context = " ".join(f"Passage {i}: the colour of house {i} is {c}." for i, c in enumerate(["red", "blue"] * 6))
    row = {"input": "What is the colour of house 3?", "context": context, "answers": ["blue"], "length": 90}
    row |= {"dataset": "hotpotqa", "language": "en", "all_classes": None}
    lines = [json.dumps(row | {"_id": f"made-up-{i}"}) + "\n" for i in range(2)]
    (folder / "longbench" / "hotpotqa.jsonl").write_text("".join(lines))
    return folder


def test_scores_of_a_real_model_from_run_to_table(tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setitem(TASKS, "hotpotqa", ("f1", 4))  # tokens of an answer: this is not about the score
    model, data = str(real_model("smollm2")), str(small_data(tmp_path / "data"))
    given = {"data": data, "tasks": ["longbench/hotpotqa"], "budgets": ["48"], "limit": 1}
    assert tables.run(options(tmp_path, 1, model, **given)) == 0
    shown = capsys.readouterr().out
    assert "another model" in shown and "--limit 1" in shown and "49.29" in shown
    rows = lines_of(tmp_path / "paper" / "table-1.csv")
    methods = [r["method"] for r in rows]
    assert methods[0] == "samples" and rows[0]["Avg"] == "1/3750" and methods[1] == "full"
    assert {"h2o", "snapkv", "pyramidkv", "adakv", SYSTEM, "momentkv", "random"} <= set(methods)
    assert methods.count("adakv") == 2 and {r["equal"] for r in rows[1:]} == {"-", "tokens", "bytes"}
    assert all(0 <= float(r["MQA"]) <= 100 and r["Avg n"] == "1" for r in rows[1:])
    written = (tmp_path / "paper" / "longbench" / "rows.jsonl").read_bytes()
    assert tables.run(options(tmp_path, 7, model, **given)) == 0  # of the same run, which is complete
    assert (tmp_path / "paper" / "longbench" / "rows.jsonl").read_bytes() == written
    assert (tmp_path / "paper" / "table-7.md").is_file()


# speed


def order_variants(budget="44"):
    return [v for v in variants_of(ORDERED, [budget]) if v.method in latency.ORDERS and v.match == "tokens"]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(latency, "ROUNDS", 2)


def test_every_order_is_timed(tiny):
    found = latency.measure(tiny, order_variants(), prompt(1, 120)[0].tolist())
    assert found.keys() == latency.ORDERS.keys()
    for method, timing in found.items():
        assert not timing.failure and timing.steps == latency.ROUNDS * latency.STEPS, method
        assert 0 < timing.low <= timing.median <= timing.high


@pytest.mark.parametrize(("broken", "said"), [("nan", "not finite"), ("worst", "not the model's own")])
def test_no_speed_of_what_is_wrong(tiny, monkeypatch, broken, said):
    real = latency._step

    def wrong(model, cache, ids):
        logits = real(model, cache, ids)
        if isinstance(cache, MomentCache) and cache.settings and cache.settings.correction == "first":
            return logits * torch.nan if broken == "nan" else -logits
        return logits

    monkeypatch.setattr(latency, "_step", wrong)
    found = latency.measure(tiny, order_variants(), prompt(1, 120)[0].tolist())
    assert {m for m, t in found.items() if t.failure} == {ORDERED[2], ORDERED[3]}
    assert all(said in t.failure and t.median is None for t in found.values() if t.failure)


def test_no_speed_when_values_stop_being_finite_later(tiny, monkeypatch):
    real, calls = latency._step, []

    def later(model, cache, ids):
        calls.append(cache)
        logits = real(model, cache, ids)
        return logits * torch.nan if len(calls) == 60 else logits

    monkeypatch.setattr(latency, "_step", later)
    found = latency.measure(tiny, order_variants(), prompt(1, 120)[0].tolist())
    assert found.keys() == latency.ORDERS.keys()
    assert [(t.failure, t.median) for t in found.values() if t.failure] == [("logits are not finite", None)]
