"""RULER and the needle grid: the samples have the official structure, at any length."""

import json
import re
from collections import Counter

import pytest

from conftest import real_model
from helpers import shared_data

pytest.importorskip("lm_eval")
from momentkv.evals.prompts import prompt_of
from momentkv.evals.task import Source, TaskError
from momentkv.evals.tasks import tasks_of
from momentkv.evals.tasks.niah import DEPTHS, Grid
from momentkv.evals.tasks.ruler import Ruler, largest, ruler_tasks
from momentkv.evals.tasks.ruler_text import NIAH

DATA = shared_data()
FREE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")  # need no data
ALL = tuple(task.name for task in ruler_tasks())
NEEDLE = r"One of the special magic (?:numbers|uuids) for (.+?) is: ([\w-]+)\."


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model("smollm2"))


def samples(tokenizer, name: str, length: int = 2048, limit: int = 3, seed: int = 42):
    if name not in FREE and DATA is None:
        pytest.skip("needs the essays and documents")
    return Ruler(name).samples(Source(tokenizer, DATA, limit=limit, length=length, seed=seed))


def test_there_are_thirteen():
    assert len(ALL) == 13 and len(set(ALL)) == 13


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("length", [1024, 2048])
def test_samples_fill_their_length(tokenizer, name, length):
    if name.startswith("qa") and length == 1024:
        length = 4096  # ten documents of HotpotQA do not fit into less
    for sample in samples(tokenizer, name, length):
        tokens = len(prompt_of(sample, tokenizer, "aware"))
        assert tokens == sample.facts["tokens"]
        least = 0.75 if name.startswith("qa") or name == "cwe" else 0.88
        assert least * length < tokens + sample.max_new_tokens <= length


@pytest.mark.parametrize("name", NIAH)
def test_needles(tokenizer, name):
    own = NIAH[name]
    keys, values, asked = (own.get(n, 1) for n in ("keys", "values", "queries"))
    for sample in samples(tokenizer, name):
        found = re.findall(NEEDLE, sample.context)
        if own["type_haystack"] == "needle":
            assert len(found) > 20
        else:
            assert len(found) == keys * values
        told = dict(found) if values == 1 else {}
        names = re.findall(r"for (.*) mentioned", sample.question)[0].replace(" and ", " ").split(", ")
        assert len(names) == asked and len(sample.answers) == asked * values
        for key in names:
            mine = [v for k, v in found if k == key.strip()]
            assert len(mine) == values and set(mine) <= set(sample.answers)
            assert not told or told[key.strip()] in sample.answers
        assert sample.prefix.endswith(" is" if asked * values == 1 else " are")
        assert 0 <= sample.facts["depth"] <= 1 and sample.max_new_tokens == 128
        kind = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"}[own["type_needle_v"]]
        assert all(re.fullmatch(kind, answer) for answer in sample.answers)


def test_variable_tracking_resolves(tokenizer):
    for sample in samples(tokenizer, "vt"):
        value = re.findall(r"the value (\d+) in the text above", sample.question)[0]
        text = sample.context.rsplit("Memorize and track", 1)[1]  # without the worked example
        assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
        assert len(assigned) == 5

        def root(name, assigned=assigned):
            return root(assigned[name]) if name in assigned else name

        assert {name for name in assigned if root(name) == value} == set(sample.answers)
        assert sample.context.count("Answer:") == 1 and value in sample.prefix
        assert sample.prefix.endswith("they are:")


@pytest.mark.parametrize("length", [2048, 4096])
def test_common_words_are_the_most_common(tokenizer, length):
    for sample in samples(tokenizer, "cwe", length):
        words = Counter(re.findall(r"\d+\. (\S+)", sample.context.rsplit("Below is a numbered list", 1)[1]))
        times = (6, 1) if length < 4096 else (30, 3)
        assert {w for w, n in words.items() if n == times[0]} == set(sample.answers) and len(sample.answers) == 10
        assert set(words.values()) == set(times)


def test_frequent_words_are_the_most_frequent(tokenizer):
    for sample in samples(tokenizer, "fwe"):
        words = Counter(sample.context.split("coded words. ", 1)[1].split())
        assert words.most_common(1)[0][0] == "..."
        assert {word for word, _ in words.most_common(4)[1:]} == set(sample.answers)


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_documents_hold_the_answer(tokenizer, name):
    drawn = samples(tokenizer, name, 4096, 4)
    for sample in drawn:
        numbers = re.findall(r"Document (\d+):", sample.context)
        assert numbers == [str(i + 1) for i in range(len(numbers))]
        yes_no = sample.answers[0] in ("yes", "no")
        assert yes_no or any(answer in sample.context for answer in sample.answers)
    assert len({s.question for s in drawn}) == 4


@pytest.mark.parametrize("name", ALL)
def test_samples_are_repeatable_and_fewer_are_the_first_of_more(tokenizer, name):
    length = 4096 if name.startswith("qa") else 1024
    assert samples(tokenizer, name, length, 2) == samples(tokenizer, name, length, 3)[:2]
    assert samples(tokenizer, name, length, 1, seed=7) != samples(tokenizer, name, length, 1)


def test_generators_leave_the_random_state_alone(tokenizer):
    import random

    before = random.getstate()
    samples(tokenizer, "vt", 1024, 1)
    assert random.getstate() == before


def form(text: str) -> str:
    """A prompt without what was drawn."""
    text = re.sub(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", "UUID", text)
    needle = "One of the special magic uuids for UUID is: UUID."
    return re.sub(rf"(?:{re.escape(needle)}\n?)+", "NEEDLES\n", text)


@pytest.mark.skipif(DATA is None, reason="needs official samples")
def test_prompts_have_the_form_of_the_official_ones(tokenizer):
    with (DATA / "ruler" / "niah_multikey_3_4096.jsonl").open() as lines:
        official = [json.loads(line)["input"] for line in lines]
    forms = {form(text) for text in official}
    assert len(official) == 40 and len(forms) == 1
    for sample in samples(tokenizer, "niah_multikey_3", 4096):
        assert form(sample.context + sample.question + sample.prefix) in forms


def test_scores():
    task, part = Ruler("niah_multivalue"), Ruler("qa_1")
    sample = type("S", (), {"answers": ("Aa", "bb", "cc", "dd")})()
    assert task.score("x aA, bb\tdd.", sample) == 0.75 and task.score("", sample) == 0
    assert part.score("it is BB", sample) == 1 and part.score("b b", sample) == 0


def test_what_does_not_fit_or_is_not_there_is_said(tokenizer, tmp_path):
    with pytest.raises(TaskError, match=r"ruler/vt.*--length 300; at least about \d+"):
        samples(tokenizer, "vt", 300, 1)
    with pytest.raises(TaskError, match=r"PaulGrahamEssays.json.*not there"):
        Ruler("niah_single_2").samples(Source(tokenizer, tmp_path, limit=1))
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "PaulGrahamEssays.json").write_text("{")
    (tmp_path / "ruler" / "squad_dev_subset_xquad_en.json").write_text('{"data": [{}]}')
    with pytest.raises(TaskError, match=r"PaulGrahamEssays.json.*cannot be read"):
        Ruler("niah_single_2").samples(Source(tokenizer, tmp_path, limit=1))
    with pytest.raises(TaskError, match=r"squad.*official form"):
        Ruler("qa_1").samples(Source(tokenizer, tmp_path, limit=1))
    with pytest.raises(TaskError, match=r"ruler/vtt.*ruler/vt,"):
        tasks_of(["ruler/vtt"])


def test_fitting_finds_the_largest():
    for limit in (8, 9, 63, 64, 1000, 4321):
        found = largest(lambda n, limit=limit: n <= limit, 8, 64)
        assert found <= limit and limit - found <= max(1, limit // 90)
    assert largest(lambda n: False, 8, 64) is None


def test_the_needle_grid(tokenizer):
    drawn = Grid().samples(Source(tokenizer, length=2048))
    assert len(drawn) == 3 * len(DEPTHS) and len({s.id for s in drawn}) == 15
    for sample in drawn:
        length, depth = sample.facts["length"], sample.facts["depth"]
        tokens = len(prompt_of(sample, tokenizer, "aware"))
        assert 0.9 * length < tokens + 32 <= length
        at = sample.context.index(sample.answers[0]) / len(sample.context)
        assert abs(at - depth) < 0.15
        assert Grid().score(f"It is {sample.answers[0]}.", sample) == 1 and Grid().score("1", sample) == 0
    with pytest.raises(TaskError, match=r"no needle fits"):
        Grid().samples(Source(tokenizer, length=100))
