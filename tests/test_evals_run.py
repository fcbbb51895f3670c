"""A run: rows as they come, killed and gone on with, one specification, failures recorded."""

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import real_model
from momentkv.cli import main
from momentkv.evals import rows as rows_module
from momentkv.evals.options import add_parsers
from momentkv.evals.rows import RowFile, merge_parts, read_lines
from momentkv.evals.run import in_turns, options_of
from momentkv.evals.spec import SpecError, settle
from momentkv.evals.tasks import tasks_of
from momentkv.evals.variants import variants_of


def row(sample: str, variant: str = "snapkv@128", **more) -> dict:
    return {"task": "ruler/vt", "sample": sample, "variant": variant, **more}


def test_rows_are_written_once_and_read_back(tmp_path):
    rows = RowFile(tmp_path)
    for sample in "aab":
        rows.write(row(sample, pred="ü\n"))
    assert [r["sample"] for r in read_lines(tmp_path / "rows.jsonl")] == ["a", "b"]
    assert RowFile(tmp_path).done == {("ruler/vt", s, "snapkv@128") for s in "ab"}


def test_a_torn_last_line_is_dropped_and_measured_again(tmp_path):
    rows = RowFile(tmp_path)
    rows.write(row("a"))
    rows.write(row("b"))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    again = RowFile(tmp_path)
    assert again.done == {("ruler/vt", "a", "snapkv@128")}
    again.write(row("b"))
    assert [r["sample"] for r in read_lines(path)] == ["a", "b"]


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    rows = RowFile(tmp_path)
    rows.write(row("a"))
    before = (tmp_path / "rows.jsonl").read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rows_module.os, "fsync", full)
    with pytest.raises(OSError, match=r"rows.jsonl.*No space left.*safe.*start the same command again"):
        rows.write(row("b"))
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert ("ruler/vt", "b", "snapkv@128") not in rows.done


def test_parts_of_several_processes_become_one_file(tmp_path):
    for part in "01":
        RowFile(tmp_path, part).write(row(part))
    RowFile(tmp_path, "1").fail("ruler/vt", "x", "ValueError", "no")
    assert len(RowFile(tmp_path, "2").done) == 2  # each sees what the others have done
    merge_parts(tmp_path)
    assert [r["sample"] for r in read_lines(tmp_path / "rows.jsonl")] == ["0", "1"]
    assert len(read_lines(tmp_path / "errors.jsonl")) == 1
    assert not list(tmp_path.glob("rows.*.jsonl"))


def test_another_specification_is_refused_with_the_difference(tmp_path):
    settle(tmp_path, {"limit": 3, "versions": {"torch": "2.13"}, "tasks": ["a"]})
    settle(tmp_path, {"limit": 3, "versions": {"torch": "2.13"}, "tasks": ["a"]})
    with pytest.raises(SpecError, match=r"limit: 3 there, 4 asked for; versions.torch: '2.13' there, '2.14'"):
        settle(tmp_path, {"limit": 4, "versions": {"torch": "2.14"}, "tasks": ["a"]})
    (tmp_path / "spec.json").write_text("{")
    with pytest.raises(SpecError, match="damaged"):
        settle(tmp_path, {})


def test_what_follows_from_the_options_is_named_only_where_no_option_differs(tmp_path):
    settle(tmp_path, {"seed": 1, "data": {"ruler/vt": "aa"}, "variants": ["full@full"]})
    with pytest.raises(SpecError, match=r"asked for$") as stop:
        settle(tmp_path, {"seed": 2, "data": {"ruler/vt": "bb"}, "variants": ["full@full"]})
    assert "seed: 1 there, 2" in str(stop.value) and "data" not in str(stop.value)
    with pytest.raises(SpecError, match=r"data.ruler/vt: 'aa' there, 'bb' asked for"):
        settle(tmp_path, {"seed": 1, "data": {"ruler/vt": "bb"}, "variants": ["full@full"]})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--tasks", "fidelity", "--methods", ""], ["--methods", "at least one", "''"]),
        (["--tasks", " , "], ["--tasks", "at least one", "' , '"]),
        (["--tasks", "fidelity", "--seed", "1"], ["another run", "seed: 42 there, 1 asked for"]),
        (["--tasks", "fidelity", "--budgets", "64"], ["another run", "budgets: ['128'] there, ['64'] asked for"]),
        (["--tasks", "fidelity", "--out", "FILE"], ["is a file, not a folder"]),
    ],
)
def test_bad_options_are_refused_before_any_model_is_looked_for(options, named, tmp_path, capsys):
    text, taken = tmp_path / "report.txt", tmp_path / "taken"
    for path in (text, taken):
        path.write_text("A text.", encoding="utf-8")
    out, tasks = tmp_path / "out", tasks_of(["fidelity"], [text])
    out.mkdir()
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(dest="command"), int, int)
    start = ["eval", "/no/such/model", "--tasks", "fidelity", "--texts", str(text), "--out", str(out)]
    args = parser.parse_args(start)
    settle(out, options_of(args, tasks, variants_of(args.methods, args.budgets)))
    try:
        status = main([*start, *(str(taken) if option == "FILE" else option for option in options)])
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert status == 2 and all(word in err for word in named), err
    assert "/no/such/model" not in err


def test_tasks_take_turns():
    class Named:
        def __init__(self, full_name):
            self.full_name = full_name

    a, b, c = map(Named, "abc")
    assert in_turns([a, b, c], {"a": [1, 2, 3], "b": [4], "c": []}) == [(a, 1), (b, 4), (a, 2), (a, 3)]


@pytest.fixture(scope="session")
def text(tmp_path_factory, reference_text) -> Path:
    path = tmp_path_factory.mktemp("text") / "reference.txt"
    path.write_text(reference_text[:60_000])
    return path


def command(out: Path, text: Path, *more: str) -> list[str]:
    own = ["eval", str(real_model("smollm2")), "--tasks", "fidelity", "--texts", str(text), "--out", str(out)]
    return [
        *own,
        "--length",
        "150",
        "--follow",
        "6",
        "--budgets",
        "48",
        "--methods",
        "momentkv",
        "--dtype",
        "float32",
        *more,
    ]


def lasting(path: Path) -> dict:
    """Rows without their timing."""
    return {
        (r["task"], r["sample"], r["variant"]): {k: v for k, v in r.items() if k != "seconds"} for r in read_lines(path)
    }


def test_fidelity_from_the_command_line(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main(command(out, text)) == 0
    assert "momentkv" in capsys.readouterr().out
    rows = read_lines(out / "rows.jsonl")
    assert len(rows) == 2 * 7  # full, three anchors, momentkv, two plain ones at its bytes
    by_variant = {r["variant"]: r["values"] for r in rows if r["sample"] == "0"}
    assert by_variant["full@full"]["kl"] < 1e-5 and by_variant["full@full"]["top1"] == 1
    assert 0 < by_variant["momentkv@48"]["kl"] < by_variant["random@48"]["kl"]
    assert by_variant["momentkv@48"]["error"] < by_variant["random@48"]["error"]
    assert len(by_variant["momentkv@48"]["error_by_head"]) == 30
    assert by_variant["snapkv@48 (bytes of momentkv)"]["worse_share"] == 0
    needed = "task protocol method preset budget tokens_per_head bytes token_equivalents metric value n ci_low ci_high"
    summary = json.loads((out / "summary.json").read_text())
    assert summary and all(set(needed.split()) <= own.keys() for own in summary)
    before = (out / "rows.jsonl").read_bytes()
    assert main(command(out, text)) == 0  # nothing left to do
    assert (out / "rows.jsonl").read_bytes() == before
    assert main(command(out, text, "--limit", "1")) == 2  # another run
    assert "limit: None there, 1 asked for" in capsys.readouterr().err


def test_a_sample_that_fails_is_recorded_and_the_rest_goes_on(tmp_path, text, monkeypatch, capsys):
    from momentkv.evals import run

    real, out = run.measure, tmp_path / "run"

    def broken(setup, task, sample, write):
        if sample.id == "0":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        real(setup, task, sample, write)

    monkeypatch.setattr(run, "measure", broken)
    assert main(command(out, text)) == 1
    assert "1 of 2 samples failed" in capsys.readouterr().err
    (error,) = read_lines(out / "errors.jsonl")
    assert error["kind"] == "out of memory" and error["sample"] == "0"
    assert len(read_lines(out / "rows.jsonl")) == 7
    monkeypatch.setattr(run, "measure", real)
    assert main(command(out, text)) == 0  # tried again
    assert len(lasting(out / "rows.jsonl")) == len(read_lines(out / "rows.jsonl")) == 14


def test_killed_at_any_moment_and_started_again_gives_the_same_rows(tmp_path, text):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start = time.monotonic()
    run = [sys.executable, "-m", "momentkv.cli"]
    subprocess.run(run + command(whole, text), check=True, capture_output=True)
    seconds = time.monotonic() - start
    kills = 10 if os.environ.get("MOMENTKV_TEN_KILLS") else 2
    for i in range(kills):
        process = subprocess.Popen(run + command(parts, text), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds * (0.5 + 0.5 * (i + 1) / (kills + 1)))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(run + command(parts, text), check=True, capture_output=True)
    assert lasting(parts / "rows.jsonl") == lasting(whole / "rows.jsonl")
    assert len(read_lines(parts / "rows.jsonl")) == len(lasting(parts / "rows.jsonl"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--tasks", "rulr/vt"], "rulr/vt"),
        (["--tasks", "fidelity/nothing"], "--texts"),
        (["--texts", "/nonexistent.txt"], "nonexistent"),
        (["--length", "100000"], "too few for 2 passages"),
        (["--budgets", "8"], "least possible"),
        (["--budgets", "1kB"], "least possible"),
        (["--methods", "snapvk"], "snapvk"),
        (["--data", "/nonexistent"], "not a folder"),
    ],
)
def test_bad_input_is_one_line_before_any_work(tmp_path, text, changes, message, capsys):
    assert main(command(tmp_path / "run", text, *changes)) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()
