"""`momentkv paper --figure`: files written, their numbers those of the probe, and errors before any work."""

import csv
import json
import math
from argparse import Namespace
from itertools import pairwise

import pytest
import torch

pytest.importorskip("matplotlib")

from conftest import build
from momentkv.analysis import figure_1b, figure_2, figure_3, figure_4
from momentkv.analysis.figures import by_layer, overall, pooled, spread
from momentkv.analysis.probe import Choice, probe
from momentkv.analysis.texts import REFERENCE, Question, documents, passages, passages_of
from momentkv.cli import main
from momentkv.evals.prompts import Prompt
from momentkv.evals.task import Sample
from momentkv.hf.models import load
from test_cli import failure

WORDS = 1500


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with a tokenizer of the words w0 to w124, as a checkpoint."""
    import tokenizers
    import transformers

    path = tmp_path_factory.mktemp("model") / "tiny"
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "<end>", *(f"w{i}" for i in range(125))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(path)
    build("llama", eos_token_id=2).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def novel(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "novel.txt"
    path.write_text(" ".join(f"w{(i * i + i // 7) % 125}" for i in range(WORDS)))
    return path


@pytest.fixture
def paper(folder, novel, tmp_path, capsys):
    """Runs `momentkv paper` on the tiny model; answers the folder with the figure and what was printed."""

    def run(figure, *more):
        own = ["paper", "--figure", figure, str(folder), "--out", str(tmp_path), "--texts", str(novel)]
        assert main([*own, "--length", "160", "--follow", "6", "--dtype", "float32", "--offline", *more]) == 0
        return tmp_path, capsys.readouterr().out

    return run


def rows_of(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def passage_read(folder, novel, count=1, at=0):
    model, tokenizer = load(str(folder), dtype="float32", offline=True)
    return passages(tokenizer, "novel", novel.read_text(), count, 160, 6)[at].read(model)


def is_drawn(folder, name):
    assert (folder / f"{name}.svg").read_text().startswith("<?xml")
    assert (folder / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return rows_of(folder / f"{name}.csv")


def test_figure_2_has_the_numbers_of_the_probe(paper, folder, novel):
    out, said = paper("2", "--budgets", "40,80")
    rows = is_drawn(out, "figure-2")
    choices = [Choice("h2o", "40"), Choice("h2o", "80")]
    for p, (_, budget) in zip(probe(passage_read(folder, novel), choices), choices, strict=True):
        for quantity in figure_2.SHOWN:
            own = [r for r in rows if r["budget"] == budget and r["quantity"] == quantity]
            assert [r["layer"] for r in own] == ["all", "0", "1", "2"]
            x = getattr(p, quantity).double()
            for r, part in zip(own, [x, *x], strict=True):
                assert float(r["mean"]) == part.mean().item() or math.isclose(
                    float(r["mean"]), part.mean(), rel_tol=1e-9
                )
                quartiles = part.flatten().quantile(torch.tensor([0.25, 0.75], dtype=part.dtype))
                assert [float(r["quartile_1"]), float(r["quartile_3"])] == pytest.approx(quartiles.tolist())
                assert int(r["cells"]) == part.numel()
    by = {(r["budget"], r["quantity"]): float(r["mean"]) for r in rows if r["layer"] == "all"}
    assert by["40", "weight"] > by["80", "weight"] > 0 and by["40", "error"] > by["80", "error"]
    assert "tiny, h2o, N = 160" in said and "3 layers, 4 query heads and 6 queries" in said
    assert f"{by['40', 'weight']:.4f}" in said


def test_figure_2_shortens_the_context_and_keeps_what_follows(folder, novel, monkeypatch):
    assert figure_2.lengths_up_to(4096) == [1024, 2048, 4096]
    assert figure_2.lengths_up_to(3000) == [1024, 2048, 3000]
    assert figure_2.lengths_up_to(700) == [700]
    monkeypatch.setattr(figure_2, "SHORTEST", 100)
    model, tokenizer = load(str(folder), dtype="float32", offline=True)
    args = Namespace(texts=[str(novel)], limit=2, length=160, follow=6, budgets=["50"])
    found = figure_2.measure(model, tokenizer, args)
    assert {key: p.error.shape[-1] for key, p in found.items()} == {(100, "50"): 12, (160, "50"): 12}
    for i, passage in enumerate(passages_of(args, tokenizer, 1)):
        (alone,) = probe(passage.read(model, 100), [Choice("h2o", "50")])
        torch.testing.assert_close(found[100, "50"].error[..., 6 * i : 6 * i + 6], alone.error)
        short, whole = passage.read(model, 100), passage.read(model)
        assert short.exact.tokens == 100
        near, far = (dict(t.after.layers)[0].values for t in (short, whole))  # the first layer's are of single tokens
        torch.testing.assert_close(near, far[:, :, 60:])
        queries = [dict(t.after.layers)[0].queries.shape[-2] for t in (short, whole)]
        assert queries == [6, 6]


def test_what_has_no_value_is_left_out_of_the_means(folder, novel):
    """Nothing is evicted from a prompt that fits: there is no `f_E` to have a direction."""
    text = passage_read(folder, novel)
    fits, half = probe(text, [Choice("h2o", "200"), Choice("h2o", "64")])
    assert overall(fits, "error")[0] == overall(fits, "weight")[0] == 0
    for quantity in ("cosine", "gamma"):
        assert overall(fits, quantity).cells == 0 and math.isnan(overall(fits, quantity).mean)
        assert overall(pooled([fits, half]), quantity) == overall(half, quantity)
        assert by_layer(pooled([fits, half]), quantity) == by_layer(half, quantity)


def test_passages_are_spread_over_the_text_and_do_not_overlap(folder, novel):
    _, tokenizer = load(str(folder), offline=True)
    found = passages(tokenizer, "novel", novel.read_text(), 4, 160, 6)
    ids = tokenizer(novel.read_text())["input_ids"]
    at = [int(p.name.split()[-1]) for p in found]
    assert all(b - a >= 166 for a, b in pairwise(at)) and at[-1] + 166 <= WORDS
    assert all((*p.body, *p.rest) == tuple(ids[i : i + 166]) for p, i in zip(found, at, strict=True))
    assert list(documents([])) == [REFERENCE] and len(documents([])[REFERENCE]) > 300_000


def test_figure_3_has_the_numbers_of_the_probe(paper, folder, novel):
    out, said = paper("3", "--budgets", "48", "--limit", "2")
    rows = is_drawn(out, "figure-3")
    methods = ("h2o", "momentkv:paper", "adakv", "momentkv")
    texts = [passage_read(folder, novel, 2, i) for i in range(2)]
    found = [probe(text, [Choice(m, "48") for m in methods]) for text in texts]
    value = {(r["method"], r["sample"], r["layer"], r["quantity"]): float(r["mean"]) for r in rows}
    samples = [*dict.fromkeys(r["sample"] for r in rows if r["sample"] != "all")]
    assert len(samples) == 2 and len(value) == len(rows) == (2 * 5 + 2 * 4) * (2 + 1 + 3)
    for i, method in enumerate(methods):
        for sample, probes in zip(samples, found, strict=True):
            assert value[method, sample, "all", "corrected"] == pytest.approx(probes[i].corrected.mean().item())
        both = pooled([probes[i] for probes in found])
        for layer in range(3) if method in figure_3.CORRECTED else ():
            x = both.estimate_cosine[layer]
            assert value[method, "all", str(layer), "estimate_cosine"] == pytest.approx(x.mean().item())
        assert f"{method} {spread(both.corrected).mean:.4f}" in said
    assert value["adakv", "all", "all", "error"] == pytest.approx(value["momentkv", "all", "all", "error"])
    assert value["adakv", "all", "all", "error"] == value["adakv", "all", "all", "corrected"]


def test_a_questions_queries_are_those_of_the_models_own_answer(folder, novel):
    model, tokenizer = load(str(folder), dtype="float32", offline=True)
    ids = tokenizer(" ".join(novel.read_text().split()[:70]))["input_ids"]
    for prompt in (Prompt(ids, []), Prompt(ids[:60], ids[60:])):
        text = Question("t", "t 1", Sample("1", "", "", (), 9), prompt, 9, tokenizer).read(model)
        new = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, pad_token_id=0)[0, len(ids) :]
        assert text.exact.tokens == len(prompt.context) and len(new) > 0
        fed = [*prompt.question, *new.tolist()]
        logits = model(torch.tensor([[*prompt.context, *fed]])).logits[0, len(prompt.context) :]
        torch.testing.assert_close(text.after.logits, logits, rtol=1e-4, atol=1e-3)


def test_figure_1b_shows_the_typical_head_or_the_one_asked_for(paper, folder, novel):
    text = passage_read(folder, novel)
    (found,) = probe(text, [Choice("h2o", "64")])
    mean = found.cosine.flatten(1, 2).mean(-1)
    for more, layers, heads in (([], range(3), range(4)), (["--layer", "2", "--head", "3"], [2], [3])):
        out, said = paper("1b", "--budgets", "64", *more)
        rows = is_drawn(out, "figure-1b")
        value = {r["what"]: float(r["value"]) for r in rows}
        layer, head, query = (int(value[name]) for name in ("layer", "head", "query"))
        away = (mean - mean.flatten().quantile(0.5)).abs()
        assert away[layer, head] == min(away[i, j] for i in layers for j in heads)
        cosine = found.cosine.flatten(1, 2)[layer, head, query].item()
        assert value["cosine"] == pytest.approx(cosine) and math.cos(math.radians(value["angle"])) == pytest.approx(
            cosine
        )
        tokens = [r for r in rows if r["what"] == "token"]
        assert len(tokens) == 160 and sum(r["set"] == "R" for r in tokens) == 64
        evicted = sum(float(r["value"]) for r in tokens if r["set"] == "E")
        assert evicted == pytest.approx(value["weight"], rel=1e-6)
        assert f"layer {layer}, query head {head}" in said and "median of 12 heads" in said


def test_the_outputs_own_plane_keeps_angles_and_lengths(folder, novel):
    text = passage_read(folder, novel)
    head = figure_1b.head_of(text, Choice("h2o", "64"), 1, 2, 3)
    own = figure_1b._own_plane(head.outputs)
    for x in own:
        for y in own:
            flat = own[x][0] * own[y][0] + own[x][1] * own[y][1]
            assert flat == pytest.approx(float(head.outputs[x] @ head.outputs[y]), rel=1e-9, abs=1e-12)
    (found,) = probe(text, [Choice("h2o", "64")])
    weight = found.weight.flatten(1, 2)[1, 2, 3]
    torch.testing.assert_close(
        head.outputs["f"], (1 - weight) * head.outputs["f_R"] + weight * head.outputs["f_E"], rtol=1e-9, atol=1e-12
    )


def test_figure_4_is_drawn_from_a_run_that_is_not_repeated(paper):
    more = ["--tasks", "fidelity", "--budgets", "48,64", "--limit", "1"]
    out, said = paper("4", *more)
    rows = is_drawn(out, "figure-4")
    summary = json.loads((out / "run" / "summary.json").read_text())
    assert {(r["method"], r["budget"]) for r in rows} == {
        ("full", "full"),
        *((method, budget) for method in figure_4.METHODS for budget in ("48", "64")),
    }
    for r in rows:
        (same,) = [
            o for o in summary
            if (o["task"], o["metric"], figure_4.name_of(o), o["level"], o["match"])
            == ("fidelity/avg", "kl", r["method"], r["budget"], "tokens")
        ]  # fmt: skip
        assert (float(r["value"]), float(r["bytes"])) == (same["value"], same["bytes"])
    before = (out / "run" / "rows.jsonl").read_bytes()
    again, _ = paper("4", *more)
    assert (again / "run" / "rows.jsonl").read_bytes() == before
    assert "fidelity/avg 1 of 1" in said and "protocol aware" in said


@pytest.mark.parametrize(
    ("figure", "more", "message"),
    [
        ("5", [], "invalid choice: '5'"),
        ("1b", ["--layer", "3"], "--layer 3 is none of this model's 3: 0 to 2"),
        ("1b", ["--head", "4"], "--head 4 is none of this model's 4: 0 to 3"),
        ("1b", ["--budgets", "48,64"], "figure 1b takes one budget"),
        ("3", ["--budgets", "48,64"], "figure 3 takes one budget"),
        ("2", ["--budgets", "many"], "many"),
        ("2", ["--budgets", "1"], "least possible"),
        ("2", ["--length", "1600"], "novel has 1,500 tokens, and 1 passage(s) of 1,600 and 6 to follow need 1,606"),
        ("3", ["--limit", "40"], "need 6,640"),
        ("2", ["--table", "1"], "not allowed with"),
        ("3", ["--tasks", "longbench/qaspr"], "longbench/qaspr"),
        ("3", ["--data", "/nonexistent"], "not a folder"),
        ("4", ["--tasks", "rulr"], "rulr"),
        ("2", ["--texts", "/nonexistent.txt"], "nonexistent.txt"),
    ],
)
def test_bad_input_is_one_line_before_any_work(folder, novel, tmp_path, capsys, monkeypatch, figure, more, message):
    monkeypatch.setattr("momentkv.analysis.probe.prefill", None)
    own = ["paper", "--figure", figure, folder, "--out", tmp_path / "out", "--texts", novel, "--length", "160"]
    assert message in failure(capsys, *own, "--follow", "6", "--offline", "--no-chat-template", *more)


def test_a_figure_or_a_table_must_be_asked_for(folder, capsys):
    assert "--table" in failure(capsys, "paper", folder)
