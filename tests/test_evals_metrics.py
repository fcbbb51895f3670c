"""LongBench's and RULER's scores: the official numbers, and cases done by hand."""

import io
import json
import subprocess
import sys
from argparse import Namespace

import pytest

from helpers import shared_data

pytest.importorskip("rouge")
pytest.importorskip("jieba")
from momentkv.evals import score
from momentkv.evals.metrics import METRICS, row_score
from momentkv.evals.string_match import string_match_all, string_match_part
from momentkv.evals.task import TaskError
from momentkv.evals.tasks.longbench_table import TASKS

DATA = shared_data()
GOLDEN = DATA / "longbench_preds" if DATA else None

CASES = [  # metric, prediction, answer, score
    ("f1", "The Eiffel-Tower, in Paris!", "eiffeltower paris", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
    ("f1", "a cat cat", "the cat sat", 0.5),  # bags, not sets
    ("f1", "another theme", "other me", 0.0),  # articles are whole words
    ("f1", "", "", 0.0),
    (
        "f1_zh",
        "厦门大学\uff01",
        "《厦门大学》",
        2 / 3,
    ),  # the opening bracket counts as a word, the closing one does not
    ("f1_zh", "北京", "上海", 0.0),
    ("rouge_l", "the cat sat", "the cat sat", 1.0),
    ("rouge_l", "a b c d", "a x c y", 0.5),
    ("rouge_l", "", "a", 0.0),
    ("rouge_l", "...", "a", 0.0),
    ("rouge_l_zh", "我爱北京天安门", "我爱北京天安门", 1.0),
    ("rouge_l_zh", "", "北京", 0.0),
    ("count", "12, not 1 or 12", "12", 2 / 3),
    ("count", "12.", "1", 0.0),
    ("count", "none", "1", 0.0),
    ("count", "012", "12", 0.0),  # compared as text
    ("retrieval", "Paragraph 3, perhaps 13", "Paragraph 3", 0.5),
    ("retrieval", "third", "Paragraph 3", 0.0),
    ("retrieval_zh", "段落7", "段落7", 1.0),
    ("code_similarity", "\n# note\n`x`\nurl = 'http://a'\nreturn x", "return x", 1.0),
    ("code_similarity", "# only a note", "return", 0.0),
    ("code_similarity", "abcd", "abxy", 0.5),
    ("code_similarity", "abc", "abd", 0.67),  # whole percents
    ("code_similarity", "  x", "x", 0.5),  # white space counts
]


@pytest.mark.parametrize("name, prediction, answer, expected", CASES)
def test_by_hand(name, prediction, answer, expected):
    assert METRICS[name](prediction, answer, ()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "prediction, answer, classes, expected",
    [
        ("It is Sport.", "Sport", ("Sport", "Food"), 1.0),
        ("Sport or Food", "Sport", ("Sport", "Food"), 0.5),
        ("Food", "Sport", ("Sport", "Food"), 0.0),
        ("Other location", "Other location", ("location", "Other location"), 1.0),
        # "Other" is removed, so the loop passes over "loc", which stays
        ("Other location", "Other location", ("Other", "loc", "Other location"), 0.5),
        ("Other location", "Other location", ("Other", "Other location", "loc"), 1.0),
        ("sport", "Sport", ("Sport",), 0.0),  # case counts
    ],
)
def test_classification(prediction, answer, classes, expected):
    assert METRICS["classification"](prediction, answer, classes) == expected


def test_only_the_first_line_counts_where_it_should():
    text = "\n\nParis\nLondon"
    assert row_score("triviaqa", text, ["paris"]) == 1
    assert row_score("hotpotqa", text, ["paris"]) == pytest.approx(2 / 3)
    assert row_score("trec", "\nFood\nSport", ["Food"], ["Food", "Sport"]) == 1


def test_the_best_reference_counts():
    assert row_score("qasper", "no", ["yes", "no", "perhaps"]) == 1


def test_every_task_has_a_metric():
    assert len(TASKS) == 21 and {metric for metric, _ in TASKS.values()} == set(METRICS)


@pytest.mark.parametrize("task", TASKS)
def test_official_scores(task):
    if GOLDEN is None:
        pytest.skip("needs the official scores")
    rows = json.loads((GOLDEN / f"{task}.json").read_text(encoding="utf-8"))["rows"]
    found = [row_score(task, row["pred"], row["answers"], row["all_classes"] or ()) for row in rows]
    assert rows and found == pytest.approx([row["official_score"] for row in rows], abs=1e-6)


def test_string_match():
    assert string_match_all(" The ANSWER\x00is 12 ", ["answer", "12", "13"]) == pytest.approx(2 / 3)
    assert string_match_all("a\x07b", ["a\nb"]) == 1
    assert string_match_part("only 13", ["12", "13"]) == 1 and string_match_part("none", ["12"]) == 0


def test_jieba_says_nothing():
    code = "from momentkv.evals.metrics import METRICS as m; m['f1_zh']('北京大学', '北京', ())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


# momentkv score


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def scored(tmp_path, capsys, task: str, content: str | bytes) -> list[dict]:
    file = tmp_path / "pred.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert score.run(Namespace(task=task, file=str(file))) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_score_prints_rows_and_the_mean(tmp_path, capsys):
    content = lines(*({"pred": p, "answers": ["7"]} for p in ("7", "8", "7 or 8 or 9")))
    *rows, total = scored(tmp_path, capsys, "passage_count", content)
    assert rows == [{"index": i, "score": pytest.approx(s)} for i, s in enumerate((1, 0, 1 / 3))]
    assert total == {"task": "longbench/passage_count", "n": 3, "score": 44.44}


@pytest.mark.parametrize(
    "task, row, expected",
    [
        ("trec", {"pred": "A", "answers": ["A"], "all_classes": ["A", "B"]}, 100),
        ("longbench-e/trec", {"pred": "A B", "answers": ["A"], "all_classes": ["A", "B"]}, 50),
        ("ruler/vt", {"pred": "abc", "outputs": ["ABC", "XYZ"]}, 50),
        ("ruler/qa_2", {"pred": "abc", "answers": ["ABC", "XYZ"]}, 100),
    ],
)
def test_score_of_each_family(tmp_path, capsys, task, row, expected):
    assert scored(tmp_path, capsys, task, lines(row))[-1]["score"] == expected


def test_score_from_stdin(monkeypatch, capsys):
    content = lines({"pred": "a", "answers": ["a"]}).encode()
    monkeypatch.setattr(sys, "stdin", Namespace(buffer=io.BytesIO(content)))
    assert score.run(Namespace(task="samsum", file="-")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["n"] == 1


@pytest.mark.parametrize(
    "task, bad, message",
    [
        ("qasper", lines({"answers": ["a"]}), r"pred.jsonl:2: 'pred'"),
        ("qasper", lines({"pred": "a"}), r"pred.jsonl:2: 'answers'"),
        ("qasper", lines({"pred": "a", "answers": []}), r"pred.jsonl:2: 'answers'"),
        ("qasper", lines({"pred": "a", "answers": "a"}), r"pred.jsonl:2: 'answers'.*'a'"),
        ("qasper", "{\n", r"pred.jsonl:2 is not JSON"),
        ("qasper", "[]\n", r"pred.jsonl:2 is list, not a JSON object"),
        ("qasper", b"\xff\n", r"pred.jsonl:2 is not UTF-8"),
        ("trec", lines({"pred": "a", "answers": ["a"]}), r"pred.jsonl:2: 'all_classes'"),
        ("passage_retrieval_en", lines({"pred": "1", "answers": ["1"]}), r"pred.jsonl:2: the answer '1'"),
    ],
)
def test_bad_rows_are_named_before_anything_is_printed(tmp_path, capsys, task, bad, message):
    good = lines({"pred": "a", "answers": ["Paragraph 1"], "all_classes": ["a"]}).encode()
    with pytest.raises(ValueError, match=message):
        scored(tmp_path, capsys, task, good + (bad if isinstance(bad, bytes) else bad.encode()))
    assert capsys.readouterr().out == ""


def test_an_empty_file(tmp_path, capsys):
    with pytest.raises(TaskError, match="is empty"):
        scored(tmp_path, capsys, "qasper", "\n\n")


@pytest.mark.parametrize(
    "task, valid",
    [("treck", "trec"), ("ruler/niah", "niah_multiquery"), ("longbench-e/musique", "qasper"), ("x/y", "ruler")],
)
def test_an_unknown_task_names_the_valid_ones(task, valid):
    with pytest.raises(ValueError, match=f"{task}.*not known; valid.*{valid}"):
        score.run(Namespace(task=task, file="none"))


def test_ruler_names_agree():
    pytest.importorskip("lm_eval")
    from momentkv.evals.tasks.ruler import ruler_tasks

    assert sorted(score.RULER) == sorted(task.name for task in ruler_tasks())
