"""From rows to summaries, on made-up runs: what is read, averaged and compared, and what is said to be missing."""

import json
from statistics import fmean

import pytest

from momentkv.evals.report.layout import name_of
from momentkv.evals.results import ResultsError, read_results
from momentkv.evals.summary import summarise, write_summary
from momentkv.evals.tasks.longbench_table import CATEGORIES
from synthetic_run import SCHEMA, mixed_run, rows_of, variants, write_run


def objects(folder, task: str, metric: str | None = None) -> dict[str, dict]:
    """Of the summary, by name and level."""
    found = [o for o in summarise(read_results(folder)).objects if o["task"] == task and metric in (None, o["metric"])]
    return {f"{name_of(o)}@{o['level']}": o for o in found}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return mixed_run(tmp_path_factory.mktemp("run"))


def test_a_torn_last_line_is_left_out_with_a_note(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [0.0, 1.0]}))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [row["sample"] for row in read_results(tmp_path).rows] == ["0"]
    assert "the last line of rows.jsonl is torn and left out" in summarise(read_results(tmp_path)).notes


def test_a_last_line_that_only_lacks_its_newline_counts(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [0.0, 1.0]}))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes().rstrip())
    assert len(read_results(tmp_path).rows) == 2 and not read_results(tmp_path).notes


def test_of_repeated_rows_the_last_wins(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [0.0, 1.0]}) + rows_of({"adakv": [1.0]}))
    assert objects(tmp_path, "ruler/vt")["adakv@128"]["value"] == 100
    assert objects(tmp_path, "ruler/vt")["adakv@128"]["n"] == 2


def test_a_damaged_line_is_named(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [0.0, 1.0, 1.0]}))
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], lines[1][:50], lines[2]]) + "\n")
    with pytest.raises(ResultsError, match=r"rows\.jsonl:2: not a JSON object$"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("task", 5, r"rows.jsonl:1: 'task' must be a text, not 5"),
        ("task", "vt", r"rows.jsonl:1: task 'vt' is not FAMILY/NAME"),
        ("bytes", "12", r"rows.jsonl:1: 'bytes' must be a number, not '12'"),
        ("bytes", None, r"rows.jsonl:1: 'bytes' must be a number, not None"),
        ("values", [1], r"rows.jsonl:1: 'corrected' must be true or false, and 'values' an object"),
    ],
)
def test_a_row_that_is_no_row_is_named(tmp_path, field, value, message):
    write_run(tmp_path, rows_of({"adakv": [1.0]}, **{field: value}))
    with pytest.raises(ResultsError, match=message):
        read_results(tmp_path)


def test_no_run_and_no_rows_are_clear_errors(tmp_path):
    with pytest.raises(ResultsError, match=r"no rows\.jsonl in .*: not the folder of a run"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(ResultsError, match=r"rows\.jsonl: no rows$"):
        read_results(write_run(tmp_path, []))
    (tmp_path / "spec.json").write_text("{")
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows_of({"adakv": [1.0]})[0]) + "\n")
    with pytest.raises(ResultsError, match=r"spec\.json: not JSON"):
        read_results(tmp_path)


def test_plain_methods_that_match_two_corrected_ones_stay_apart(run):
    names = set(objects(run, "ruler/niah_single_1"))
    assert {"adakv, bytes of momentkv@128", "adakv, bytes of momentkv:paper@128", "adakv@128"} <= names
    one = variants(("128",), corrected={("momentkv", None): 0.7})
    assert any(name_of({**fields, "matched": ""}) == "adakv, equal bytes" for fields, _ in one)


def test_objects_have_the_schema_and_are_written_at_once(run, tmp_path):
    for name in ("rows.jsonl", "errors.jsonl", "spec.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    path = write_summary(tmp_path)
    found = json.loads(path.read_text())
    assert path.name == "summary.json" and sorted(p.name for p in tmp_path.iterdir()) == [
        "errors.jsonl",
        "rows.jsonl",
        "spec.json",
        "summary.json",
    ]
    assert all(o.keys() >= SCHEMA for o in found)
    assert all(o["ci_low"] <= o["value"] <= o["ci_high"] for o in found)
    for o in found:
        assert (o["baseline"] is None) == (o["difference"] is None)
    again = write_summary(tmp_path).read_text()
    assert json.loads(again) == found


def test_scores_are_times_a_hundred_and_differences_are_paired(tmp_path):
    plain, corrected = [0, 1, 1, 0, 1, 0, 0, 1], [1, 1, 1, 0, 1, 0, 0, 1]
    write_run(tmp_path, rows_of({"full": [1] * 8, "adakv": plain, "momentkv": corrected}))
    found = objects(tmp_path, "ruler/vt")
    o = found["momentkv@128"]
    assert (o["value"], o["baseline"], o["difference"], o["n"]) == (62.5, "adakv@128", 12.5, 8)
    assert o["difference_low"] == 0 and o["difference_high"] <= 37.5  # unpaired it would reach below zero
    assert found["adakv@128"]["baseline"] is None and found["full@full"]["baseline"] is None
    assert found["full@full"]["ci_low"] == found["full@full"]["ci_high"] == 100


def test_the_average_is_the_mean_of_task_means(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [1, 1, 0, 0, 0]}, "ruler/vt") + rows_of({"adakv": [1, 1]}, "ruler/cwe"))
    o = objects(tmp_path, "ruler/avg")["adakv@128"]
    assert (o["value"], o["n"], o["metric"]) == (70, 7, "score")  # not 4 of 7
    assert "ruler/avg: 2 of RULER's 13 tasks" in summarise(read_results(tmp_path)).notes


def test_the_average_of_longbench_is_that_of_english_categories(run):
    def mean(task):
        return objects(run, f"longbench/{task}")["adakv@128"]["value"]

    single, multi = mean("single-doc QA"), mean("multi-doc QA")
    assert (single, multi) == (mean("qasper"), mean("hotpotqa"))
    assert mean("avg") == pytest.approx(fmean((single, multi)))  # without the Chinese task
    notes = summarise(read_results(run)).notes
    assert "longbench/avg: 2 of 16 English tasks, 2 of 6 categories" in notes
    assert "longbench/single-doc QA: without narrativeqa, multifieldqa_en" in notes


def test_the_average_of_longbench_weighs_categories_alike(tmp_path):
    tasks = [task for inside in CATEGORIES.values() for task in inside]
    rows = []
    for i, task in enumerate(tasks):
        rows += rows_of({"adakv": [i / 20, i / 20]}, f"longbench/{task}")
    write_run(tmp_path, rows)
    by_hand = fmean(fmean(100 * tasks.index(t) / 20 for t in inside) for inside in CATEGORIES.values())
    o = objects(tmp_path, "longbench/avg")["adakv@128"]
    assert o["value"] == pytest.approx(by_hand) and by_hand != pytest.approx(fmean(range(0, 80, 5)))
    assert not any("longbench/avg" in note for note in summarise(read_results(tmp_path)).notes)


def test_length_buckets_of_longbench_e(run):
    whole = objects(run, "longbench-e/trec")["momentkv@128"]
    parts = [objects(run, f"longbench-e/trec/{b}")["momentkv@128"] for b in ("0-4k", "4-8k", "8k+")]
    assert [p["n"] for p in parts] == [3, 3, 3] and fmean(p["value"] for p in parts) == pytest.approx(whole["value"])


def test_averages_are_over_what_all_variants_have_and_it_is_said(run):
    found = objects(run, "ruler/avg")
    assert {(o["n"], o["total"]) for o in found.values()} == {(22, 24)}
    task = objects(run, "ruler/vt")
    assert (task["h2o@128"]["n"], task["adakv@128"]["n"], task["h2o@128"]["total"]) == (10, 12, 12)
    notes = summarise(read_results(run)).notes
    assert "ruler/avg: over 22 of 24 samples, those that all variants have" in notes
    assert "ruler/vt: incomplete, 2 of 27 variants lack samples: h2o@128 has 10 of 12 samples" in notes


def test_a_baseline_has_all_samples_of_the_variant(tmp_path):
    rows = rows_of({"adakv": [1], "momentkv": [0, 1, 0]})
    rows += [r | {"method": "snapkv"} for r in rows_of({"adakv": [0, 1, 0]})]
    write_run(tmp_path, rows)
    assert objects(tmp_path, "ruler/vt")["momentkv@128"]["baseline"] == "snapkv@128"  # not adakv, best of one sample
    assert objects(tmp_path, "ruler/vt")["adakv@128"]["baseline"] == "snapkv@128"
    assert objects(tmp_path, "ruler/vt")["adakv@128"]["difference"] == 100  # over the one sample that both have


def test_planned_samples_that_have_no_rows_are_said(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [1, 0]}), samples={"ruler/vt": 5, "ruler/cwe": 5})
    notes = summarise(read_results(tmp_path)).notes
    assert "ruler/vt: incomplete, 2 of 5 samples" in notes
    assert "incomplete, no rows yet of ruler/cwe: 0 of 5 samples" in notes
    average = objects(tmp_path, "ruler/avg")["adakv@128"]
    assert (average["n"], average["total"]) == (2, 10)
    assert objects(tmp_path, "ruler/vt")["adakv@128"]["total"] == 5


def test_errors_that_a_later_run_mended_do_not_count(run):
    assert [e["error"] for e in summarise(read_results(run)).errors] == ["<script>alert(1)</script>"]


def test_fidelity_is_as_it_is_and_the_smallest_is_the_strongest(run):
    found = objects(run, "fidelity/one", "kl")
    plain = [o for name, o in found.items() if not o["corrected"] and o["level"] == "128" and o["match"] == "tokens"]
    best = min(plain, key=lambda o: o["value"])
    assert found["random@128"]["value"] < 5 and found["random@128"]["baseline"] == f"{best['method']}@128"
    assert found["random@128"]["difference"] > 0
    assert "full@full" not in objects(run, "fidelity/avg", "error") and "full@full" in objects(
        run, "fidelity/avg", "kl"
    )
    assert "random@128" in objects(run, "fidelity/avg", "error")


def test_figures_that_are_not_finite_are_left_out_and_counted(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [0.5, float("nan"), 1.0]}))
    assert objects(tmp_path, "ruler/vt")["adakv@128"]["value"] == 75
    assert "ruler/vt: 1 figures are not finite and left out" in summarise(read_results(tmp_path)).notes


def test_few_samples_are_said(run, tmp_path):
    assert any("fewer than 30 samples in ruler/vt" in note for note in summarise(read_results(run)).notes)
    write_run(tmp_path, rows_of({"adakv": [0, 1] * 15}))
    assert not any("fewer than" in note for note in summarise(read_results(tmp_path)).notes)


def test_a_single_sample_has_no_interval_and_it_is_said(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [1, 0], "momentkv": [1, 1]}) + rows_of({"adakv": [1]}, "ruler/cwe"))
    found = objects(tmp_path, "ruler/cwe")["adakv@128"]
    assert (found["value"], found["ci_low"], found["ci_high"]) == (100, None, None)
    said = "no intervals of ruler/cwe: a task with a single sample says nothing about the spread"
    assert said in summarise(read_results(tmp_path)).notes


def test_rows_come_in_the_order_of_the_specification(tmp_path):
    rows = rows_of({"momentkv": [1], "adakv": [0], "full": [1]}, "ruler/vt") + rows_of({"adakv": [0]}, "ruler/cwe")
    order = ["full@full", "adakv@128", "momentkv@128"]
    write_run(tmp_path, rows, tasks=["ruler/cwe", "ruler/vt"], variants=order)
    read = [(row["task"], row["variant"]) for row in read_results(tmp_path).rows]
    assert read == [("ruler/cwe", "adakv@128"), *(("ruler/vt", name) for name in order)]
