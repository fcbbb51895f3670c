"""Every command and every line of Python in the README runs."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import real_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(program: str) -> list[str]:
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.startswith(program)]


def test_the_readme_has_what_it_promises():
    assert commands("make demo") and commands("make test") and commands("momentkv ") and blocks("python")


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command):
    if not (ROOT / "Makefile").is_file():
        pytest.skip("not in a checkout")
    subprocess.run(["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, check=True, capture_output=True)


QUICK = {
    "demo": ["--tokens", "800"],
    "generate": ["--max-new-tokens", "8"],
    "eval": ["--length", "150", "--follow", "6", "--limit", "1"],
    "paper": ["--length", "200", "--follow", "8"],
}
# what reads what another command has written is run right after that
FOLLOW_UPS = {"--save-cache": "--load-cache", "momentkv eval": "momentkv report"}


@pytest.mark.parametrize("command", [c for c in commands("momentkv") if not any(f in c for f in FOLLOW_UPS.values())])
def test_commands_run(command, tmp_path):
    if "demo" in command:
        real_model("smollm2")
    (tmp_path / "report.txt").write_text("The meeting is on the fourth of May in Lisbon. " * 40, encoding="utf-8")
    (tmp_path / "predictions.jsonl").write_text('{"pred": "City", "answers": ["City"], "all_classes": ["City"]}\n')
    args = shlex.split(command)[1:]
    if args[0] in ("eval", "score", "paper"):
        pytest.importorskip("lm_eval")
    done = subprocess.run(
        [sys.executable, "-m", "momentkv.cli", *args, *QUICK.get(args[0], [])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or "--save-cache" in command
    for first, then in FOLLOW_UPS.items():
        if first in command:
            follow_up = shlex.split(next(c for c in commands("momentkv") if then in c))[1:]
            own = [sys.executable, "-m", "momentkv.cli", *follow_up, *QUICK.get(follow_up[0], [])]
            subprocess.run(own, cwd=tmp_path, check=True)


# lm-eval's tasks and the model come from the Hub; here a task of one row and the demo model stand for them
LOCAL_TASK = """{
    "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
    "doc_to_target": 0, "metric_list": [{"metric": "acc"}],
}"""


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block, tmp_path, monkeypatch):
    folder = real_model("smollm2")
    (tmp_path / "report.txt").write_text("The meeting is on the fourth of May in Lisbon. " * 40, encoding="utf-8")
    script = block.replace("max_new_tokens=200", "max_new_tokens=8")
    if "lm_eval" in block:
        pytest.importorskip("lm_eval")
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "One and one is", "choices": ["two", "six"]}) + "\n")
        for name in ("HF_HOME", "HF_DATASETS_CACHE"):
            monkeypatch.setenv(name, str(tmp_path / name))
        local = {"HuggingFaceTB/SmolLM2-135M-Instruct": str(folder), '"longbench_trec"': LOCAL_TASK}
        for remote, here in local.items():
            assert remote in script
            script = script.replace(remote, here)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True)


def test_the_task_of_lm_eval_exists():
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    names = re.findall(r'tasks=\["(\w+)"\]', README)
    assert names and set(names) <= set(TaskManager().all_tasks)
