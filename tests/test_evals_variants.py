"""What a run compares, and the prompts under both protocols."""

import pytest

from conftest import real_model
from momentkv.evals.prompts import prompt_of, stop_tokens
from momentkv.evals.task import Sample
from momentkv.evals.variants import ANCHORS, PLAIN, variants_of


def test_full_cache_and_anchors_always_run():
    keys = [v.key for v in variants_of(["snapkv"], ["64", "128"])]
    assert keys == ["full@full", *(f"{n}@{b}" for b in (64, 128) for n in (*ANCHORS, "snapkv"))]


def test_every_corrected_method_has_plain_ones_at_its_bytes():
    variants = variants_of(["momentkv", "momentkv:paper"], ["64"])
    matched = [v for v in variants if v.match == "bytes"]
    assert [(v.method, v.matched.name) for v in matched] == [(p, "momentkv") for p in PLAIN]  # equal bytes: once
    assert not any(v.corrected for v in matched)
    zeroth = variants_of(["momentkv", "snapkv+correction=zeroth"], ["64"])
    assert len([v for v in zeroth if v.match == "bytes"]) == 2 * len(PLAIN)


def test_budgets_that_bind_the_total_are_not_matched():
    assert all(v.match == "tokens" for v in variants_of(["momentkv"], ["128te", "4MiB"]))


def test_changed_settings_are_part_of_the_name():
    variant = variants_of(["snapkv:kvpress+correction=first+window=48"], ["128"])[4]
    assert variant.key == "snapkv:kvpress+correction=first+window=48@128"
    assert variant.settings.correction == "first" and variant.settings.window == 48 and variant.corrected


@pytest.mark.parametrize(
    ("methods", "budgets", "message"),
    [
        (["snapvk"], ["128"], "snapvk.*valid"),
        (["snapkv:papr"], ["128"], "papr.*valid"),
        (["zzz*"], ["128"], r"zzz\*"),
        (["snapkv+windw=3"], ["128"], "windw"),
        (["snapkv+window"], ["128"], "NAME=VALUE"),
        (["snapkv"], ["12x"], "12x"),
        (["snapkv"], ["128", "128"], "twice"),
        (["snapkv"], [], "at least one budget"),
    ],
)
def test_bad_names_and_budgets_are_quoted(methods, budgets, message):
    with pytest.raises(ValueError, match=message):
        variants_of(methods, budgets)


def sample(**changes) -> Sample:
    return Sample(
        **({"id": "1", "context": "A long text. " * 5, "question": "\nWho?", "answers": ("x",)} | changes),
        max_new_tokens=5,
    )


def test_both_protocols_hold_the_same_text():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model("smollm2"))
    mine = sample(prefix=" The answer is")
    aware, agnostic = (prompt_of(mine, tokenizer, p) for p in ("aware", "agnostic"))
    assert not aware.question and len(aware) == len(aware.context)
    assert tokenizer.decode(aware.context) == tokenizer.decode(agnostic.context + agnostic.question)
    assert "Who" not in tokenizer.decode(agnostic.context) and "long text" not in tokenizer.decode(agnostic.question)
    assert tokenizer.decode(aware.context).endswith("assistant\n The answer is")
    plain = prompt_of(mine, tokenizer, "aware", template=False)
    assert tokenizer.decode(plain.context) == mine.context + mine.question + mine.prefix
    with pytest.raises(ValueError, match="no context"):
        prompt_of(sample(context="", chat=False), tokenizer, "agnostic")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="--no-chat-template"):
        prompt_of(mine, tokenizer, "aware")


def test_stops_are_the_models_and_the_samples(smollm2):
    model, tokenizer = smollm2
    stops, not_first = stop_tokens(model, tokenizer, sample())
    assert tokenizer.eos_token_id in stops and not not_first
    stops, not_first = stop_tokens(model, tokenizer, sample(stop=("\n",)))
    assert tokenizer("\n").input_ids[-1] in stops and not_first == stops
