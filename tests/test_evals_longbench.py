"""LongBench: the prompts are the official ones, in two parts; rows are checked; long prompts lose their middle."""

import json

import pytest

from conftest import real_model
from helpers import shared_data

pytest.importorskip("lm_eval")
pytest.importorskip("yaml")
from momentkv.evals.prompts import prompt_of
from momentkv.evals.task import Source, TaskError
from momentkv.evals.tasks import longbench_data
from momentkv.evals.tasks.longbench import LongBench, LongBenchE, longbench_tasks, without_middle
from momentkv.evals.tasks.longbench_data import template
from momentkv.evals.tasks.longbench_table import CATEGORIES, ENGLISH, EXTENDED, NO_CHAT, TASKS

DATA = shared_data()
ROW = {
    "_id": "a1",
    "context": "CONTEXT {{question}} {x}",
    "input": "QUESTION {{context}}",
    "answers": ["yes", "no"],
    "all_classes": ["yes", "no"],
    "length": 4000,
    "dataset": "trec",
    "language": "en",
}


class Characters:
    """A tokenizer with a token per character, and one that starts each text."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [0] * add_special_tokens + [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids[ids[:1] == [0] and skip_special_tokens :]))


@pytest.fixture
def folder(tmp_path):
    """A data folder with the same rows for each task: `write(rows)` changes them."""

    def write(*rows, raw: bytes | None = None):
        text = "".join(json.dumps(row) + "\n" for row in rows).encode() if raw is None else raw
        for name, tasks in (("longbench", TASKS), ("longbench_e", EXTENDED)):
            (tmp_path / name).mkdir(exist_ok=True)
            for task in tasks:
                (tmp_path / name / f"{task}.jsonl").write_bytes(text)
        return tmp_path

    return write


def samples(task, data, **options):
    return task.samples(Source(Characters(), data, **options))


def test_the_tasks():
    names = [task.full_name for task in longbench_tasks()]
    assert len(names) == len(set(names)) == 34 and len(TASKS) == 21 and len(ENGLISH) == 16 and len(EXTENDED) == 13
    assert set(ENGLISH) <= set(TASKS) and len(CATEGORIES) == 6
    assert names[0] == "longbench/narrativeqa" and names[21] == "longbench-e/qasper"


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_holds_the_row_once_and_no_placeholder_is_filled_twice(folder, task):
    (sample,) = samples(LongBench(task), folder(ROW))
    assert sample.context.endswith(ROW["context"]) and sample.context.count("CONTEXT") == 1
    asks = "{{question}}" in template(task)[1]
    assert sample.question.count(ROW["input"]) == asks and sample.question.strip()
    assert (sample.id, sample.answers, sample.max_new_tokens) == ("a1", ("yes", "no"), TASKS[task][1])
    assert sample.all_classes == (("yes", "no") if task in ("trec", "lsht") else ())
    assert sample.chat is (task not in NO_CHAT) and sample.stop == (("\n",) if task == "samsum" else ())


@pytest.mark.parametrize(
    "task, end",
    [
        ("trec", "C\nQ"),
        ("lsht", "C\nQ"),
        ("triviaqa", "C\n\nQ"),
        ("samsum", "C\n\nQ"),
        ("passage_count", "The final answer is: "),
        ("passage_retrieval_en", "The answer is: "),
        ("lcc", "CNext line of code:\n"),
        ("repobench-p", "CQNext line of code:\n"),
        ("qasper", "Question: Q\n\nAnswer:"),
        ("vcsum", "C\n\n会议总结："),  # noqa: RUF001
    ],
)
def test_prompts_end_as_official(folder, task, end):
    (sample,) = samples(LongBench(task), folder(ROW | {"context": "C", "input": "Q"}))
    assert (sample.context + sample.question).endswith(end)


def test_prompts_begin_as_official(folder):
    (sample,) = samples(LongBench("lcc"), folder(ROW | {"context": "C"}))
    assert sample.context == "Please complete the code given below. \nC"


def test_scores_are_of_the_task(folder):
    (sample,) = samples(LongBench("trec"), folder(ROW))
    assert LongBench("trec").score("yes, or no", sample) == 0.5
    assert LongBench("samsum").score("\nyes\nelse", sample) == pytest.approx(1)


@pytest.mark.parametrize("length, bucket", [(3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+")])
def test_buckets(folder, length, bucket):
    data = folder(ROW | {"length": length})
    assert samples(LongBenchE("trec"), data)[0].facts["bucket"] == bucket
    assert "bucket" not in samples(LongBench("trec"), data)[0].facts


# what is cut and what is left out


@pytest.mark.parametrize("extra", [0, 1, 2, 50, 400])
@pytest.mark.parametrize("limit", [40, 41])
def test_the_middle_is_cut(extra, limit):
    question = "?QUESTION"
    context = "".join(chr(0x4E00 + i) for i in range(limit - 1 - len(question) + extra))
    ids = Characters()(context + question)["input_ids"]
    whole = context + question
    if extra:
        half = limit // 2
        whole = whole[: half - 1] + whole[-half:]  # the first half has the token that starts the text
    assert len(ids) == limit + extra
    assert without_middle(context, question, Characters(), limit) == (whole.removesuffix(question), question)


def test_a_cut_through_the_question():
    context, question = "abcde", "".join(chr(0x4E00 + i) for i in range(100))
    kept = without_middle(context, question, Characters(), 40)
    assert kept == (context + question[:14], question[-20:])


def test_a_length_that_leaves_nothing():
    with pytest.raises(TaskError, match="--max-length 1"):
        without_middle("abc", "def", Characters(), 1)


def test_long_rows_are_left_out_before_the_limit_counts(folder):
    rows = [ROW | {"_id": str(i), "context": "x" * n} for i, n in enumerate((10, 5000, 20, 6000, 30))]
    data = folder(*rows)

    def chosen(**options):
        return [sample.id for sample in samples(LongBench("trec"), data, **options)]

    assert chosen() == ["0", "1", "2", "3", "4"] and chosen(limit=2) == ["0", "1"]
    assert chosen(max_tokens=1000) == ["0", "2", "4"] and chosen(max_tokens=1000, limit=2) == ["0", "2"]
    assert chosen(max_tokens=1000, max_length=1000) == ["0", "1", "2", "3", "4"]  # cut first
    exact = samples(LongBench("trec"), data)[0].facts["tokens"]
    assert chosen(max_tokens=exact, limit=1) == ["0"] and "0" not in chosen(max_tokens=exact - 1)


# data that is not as it should be


def damaged(**changes) -> bytes:
    row = {k: v for k, v in (ROW | changes).items() if v is not None}
    return (json.dumps(ROW | {"_id": "first"}) + "\n" + json.dumps(row) + "\n").encode()


@pytest.mark.parametrize(
    "raw, message",
    [
        (damaged(context=None), "trec.jsonl:2: 'context' must be a string; got none"),
        (damaged(input=3), "trec.jsonl:2: 'input' must be a string; got 3"),
        (damaged(answers=[]), "trec.jsonl:2: 'answers'"),
        (damaged(length="long"), "trec.jsonl:2: 'length' must be a whole number; got 'long'"),
        (damaged(all_classes=None), "trec.jsonl:2: 'all_classes'"),
        (damaged(_id="first"), "trec.jsonl:2: the '_id' 'first' was there before"),
        (damaged()[:-9], "trec.jsonl:2 is not JSON"),
        (damaged() + b"\xff\xfe\n", "trec.jsonl:3 is not UTF-8"),
        (damaged() + b"7\n", "trec.jsonl:3 is int, not a JSON object"),
        (b"\n", "trec.jsonl is empty"),
    ],
)
@pytest.mark.parametrize("kind", [LongBench, LongBenchE])
def test_damage_is_named(folder, kind, raw, message):
    with pytest.raises(TaskError, match=message) as error:
        samples(kind("trec"), folder(raw=raw), limit=1)  # also where only the first row is wanted
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"longbench_e.lcc\.jsonl' is not there"):
        samples(LongBenchE("lcc"), tmp_path)


def test_no_hub_says_what_to_do(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(TaskError, match=r"qasper_e cannot be had from the hub \(no network\): pass --data DIR"):
        samples(LongBenchE("qasper"), None)


def test_rows_from_the_hub(monkeypatch, tmp_path):
    import zipfile

    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("data/trec.jsonl", json.dumps(ROW | {"_id": "plain"}))
        files.writestr("data/trec_e.jsonl", json.dumps(ROW | {"_id": "extended"}))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **kwargs: str(archive))
    assert [samples(kind("trec"), None)[0].id for kind in (LongBench, LongBenchE)] == ["plain", "extended"]


def test_without_lm_eval(monkeypatch):
    template.cache_clear()
    monkeypatch.setattr(longbench_data, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"momentkv\[eval\]"):
        template("trec")


# real rows, real tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model("smollm2"))


@pytest.mark.parametrize("task", TASKS)
def test_real_rows(tokenizer, task):
    if DATA is None:
        pytest.skip("needs LongBench's rows")
    rows = list(map(json.loads, (DATA / "longbench" / f"{task}.jsonl").read_bytes().splitlines()))
    length = 3500
    found = LongBench(task).samples(Source(tokenizer, DATA, max_length=length, limit=4, template=False))
    assert [sample.id for sample in found] == [row["_id"] for row in rows][:4]
    before, after = template(task)
    for sample, row in zip(found, rows, strict=False):
        official = before + row["context"] + after.replace("{{question}}", row["input"])
        ids = tokenizer(official, verbose=False)["input_ids"]
        if len(ids) > length:
            halves = ids[: length // 2], ids[-(length // 2) :]
            official = "".join(tokenizer.decode(half, skip_special_tokens=True) for half in halves)
        assert sample.context + sample.question == official
        tokens = len(prompt_of(sample, tokenizer, "aware", template=False))
        assert tokens == sample.facts["tokens"] <= length + 8  # two halves joined may become a few tokens more
        assert prompt_of(sample, tokenizer, "agnostic", template=False).question
        if len(tokenizer(row["input"])["input_ids"]) < length // 4:
            assert sample.question == after.replace("{{question}}", row["input"])


def test_a_run_from_the_command_line(folder, tmp_path_factory, capsys):
    from momentkv.cli import main

    context = "Paragraph 1: Lisbon lies on the Tagus.\nParagraph 2: Madrid does not.\n" * 5
    data = folder(ROW | {"context": context, "input": "A city on a river.", "answers": ["Paragraph 1"]})
    out, name = tmp_path_factory.mktemp("run"), "longbench/passage_retrieval_en"
    options = ["--data", str(data), "--out", str(out), "--methods", "snapkv", "--budgets", "48", "--dtype", "float32"]
    assert main(["eval", str(real_model("smollm2")), "--tasks", name, *options]) == 0
    capsys.readouterr()
    (sample,) = samples(LongBench("passage_retrieval_en"), data)
    rows = list(map(json.loads, (out / "rows.jsonl").read_bytes().splitlines()))
    assert {row["method"] for row in rows} == {"full", "random", "streaming", "knorm", "snapkv"}
    for row in rows:
        assert (row["task"], row["sample"]) == (name, "a1")
        assert row["values"] == {"retrieval": LongBench("passage_retrieval_en").score(row["pred"], sample)}
    assert name in {entry["task"] for entry in json.loads((out / "summary.json").read_text())}
