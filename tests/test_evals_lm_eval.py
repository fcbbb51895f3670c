"""lm-eval's model: answers and likelihoods are those of a MomentCache, and of HFLM where everything fits."""

import json

import pytest
import torch

from conftest import real_model

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from momentkv.evals.lm_eval import MomentLM  # noqa: E402
from momentkv.hf import MomentCache, attend  # noqa: E402
from momentkv.hf.compat import cache_argument  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own
FACT = "The number of the Lisbon office is 7294816. "
CONTEXT = "The meeting is on the fourth of May. " * 8 + FACT + "Bring a coat, for it rains in spring. " * 4
ROWS = [
    {"text": CONTEXT + "The number of the office is", "answer": "7294816", "choices": [" 7294816", " a coat"]},
    {"text": "Two and two make", "answer": "four", "choices": [" four", " twenty"]},
    {"text": FACT * 5 + "In spring it", "answer": "rains", "choices": [" rains and pours", " snows"]},
]


@pytest.fixture(scope="module")
def lm():
    """One model in fp32 for all; `lm(...)` is a MomentLM on it, `lm.plain` lm-eval's own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = real_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    own = {"tokenizer": AutoTokenizer.from_pretrained(folder), "device": "cpu"}

    def build(**options):
        return MomentLM(model, **own, **options)

    build.plain = HFLM(model, **own)
    return build


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def generate(model, texts, **options):
    own = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False} | options
    return model.generate_until(requests("generate_until", *((t, own) for t in texts)), disable_tqdm=True)


def likelihoods(model, pairs):
    return model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)


TEXTS = [row["text"] for row in ROWS]
PAIRS = [(row["text"], choice) for row in ROWS for choice in row["choices"]]


@pytest.mark.parametrize("method", ["snapkv", "momentkv:paper", "full"])
def test_with_room_for_everything_it_is_hflm(lm, method):
    mine = lm(budget=400, method=method)
    assert generate(mine, TEXTS) == generate(lm.plain, TEXTS)
    found, expected = likelihoods(mine, PAIRS), likelihoods(lm.plain, PAIRS)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=2e-3)


def by_hand(lm, text, new, **options):
    """Greedy tokens after a prompt, step by step."""
    model, tokenizer = lm.plain.model, lm.plain.tokenizer
    ids = tokenizer(text, return_tensors="pt").input_ids
    cache, tokens = MomentCache(model.config, **options), []
    with attend(model), torch.no_grad():
        for _ in range(new):
            logits = model(input_ids=ids, use_cache=True, **cache_argument(cache)).logits[:, -1]
            ids = logits.argmax(-1, keepdim=True)
            tokens.append(int(ids))
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("options", [{"method": "snapkv"}, {"method": "momentkv", "preset": "paper"}])
def test_a_small_budget_decodes_from_the_cache(lm, options):
    options |= {"budget": 48}
    mine = lm(**options)
    found = generate(mine, TEXTS)
    assert found == [by_hand(lm, t, 8, **options).split("\n\n")[0] for t in TEXTS]
    assert found[0] != generate(lm.plain, TEXTS)[0]  # the number is gone
    ids = lm.plain.tokenizer(PAIRS[0][0] + PAIRS[0][1], return_tensors="pt").input_ids
    start = len(lm.plain.tokenizer(PAIRS[0][0]).input_ids)
    model, cache, logp = lm.plain.model, MomentCache(lm.plain.model.config, **options), 0.0
    with attend(model), torch.no_grad():
        logits = model(input_ids=ids[:, :start], use_cache=True, **cache_argument(cache)).logits[0, -1:]
        rest = model(input_ids=ids[:, start:-1], use_cache=True, **cache_argument(cache)).logits[0]
    logp = torch.cat([logits, rest]).log_softmax(-1).gather(-1, ids[0, start:, None]).sum()
    (value, _), *others = likelihoods(mine, PAIRS)
    assert value == pytest.approx(float(logp), abs=2e-3)
    assert abs(value - likelihoods(lm.plain, PAIRS[:1])[0][0]) > 0.05
    assert len(others) == len(PAIRS) - 1


def test_padded_rows_answer_as_alone(lm):
    options = {"budget": 48, "method": "momentkv"}
    assert generate(lm(**options, batch_size=3), TEXTS) == generate(lm(**options), TEXTS)


def test_simple_evaluate_on_local_rows(lm, tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    found = lm_eval.simple_evaluate(model=lm(budget=400), tasks=[task], bootstrap_iters=0)
    expected = lm_eval.simple_evaluate(model=lm.plain, tasks=[task], bootstrap_iters=0)
    assert found["results"]["local"]["acc,none"] == expected["results"]["local"]["acc,none"]
    assert found["config"]["momentkv"]["budget"] == 400


def test_what_is_too_long_loses_its_beginning(lm):
    mine, plain = lm(budget=400, max_length=60), lm.plain
    monkey, plain._max_length = plain._max_length, 60
    try:
        found, expected = likelihoods(mine, PAIRS[:2]), likelihoods(plain, PAIRS[:2])
    finally:
        plain._max_length = monkey
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=2e-3)
    with pytest.raises(ValueError, match="max_length=60"):
        likelihoods(mine, [("a", " b" * 70)])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "nope"}, "'nope'"),
        ({"budget": "12x"}, "'12x'"),
        ({"windw": 3}, "windw"),
        ({"peft": "adapter"}, "peft='adapter'"),
        ({"backend": "seq2seq"}, "decoder-only"),
    ],
)
def test_bad_input_before_the_model_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        MomentLM("/no/such/model", **options)


def test_perplexity_of_whole_texts_is_refused(lm):
    with pytest.raises(NotImplementedError, match="fidelity"):
        lm(budget=48).loglikelihood_rolling(requests("loglikelihood_rolling", ("text",)))


def test_it_is_registered():
    from lm_eval.api.registry import get_model

    assert get_model("momentkv") is MomentLM
