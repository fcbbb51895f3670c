"""The command line: what it prints where, its exit status, and that a saved prompt continues as an unsaved one."""

import io
import json
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from momentkv import METHODS, __version__
from momentkv.cli import main
from momentkv.hf.models import DEMO_NAME, cache_dir

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SPECIAL = ["<unk>", "<user>", "<system>", "<assistant>", "<end>"]
DOCUMENT = " ".join(f"w{i * 37 % 90}" for i in range(150))
BUDGET = ["--budget", "48", "--max-new-tokens", "8"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random two-layer llama model and a tokenizer of the words w0 to w89."""
    folder = tmp_path_factory.mktemp("tiny")
    words = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(90))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(words)}
    config = LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
        bos_token_id=None, eos_token_id=words["<end>"], **size,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT)
    return str(path)


@pytest.fixture
def generate(tiny, capsys):
    """Runs `momentkv generate` on the tiny model; answers what came on stdout."""

    def run(*args):
        assert main(["generate", str(tiny), "--offline", *map(str, args)]) == 0
        return capsys.readouterr().out

    run.model = tiny
    return run


def failure(capsys, *args):
    """The one line on stderr of a call that must fail with status 2 and print nothing else."""
    try:
        status = main([str(arg) for arg in args])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("momentkv: error: ") and err.count("\n") == 1, err
    return err


def test_help_in_a_process_of_its_own_that_loads_no_transformers():
    code = "import sys, momentkv.cli as c; c.main([]); sys.exit(bool({'transformers', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in ("methods", "generate", "demo"))


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "momentkv", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"momentkv {__version__}\n")


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"momentkv {__version__}\n"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 1)])
def test_an_interruption_is_no_traceback(error, status, capfd, monkeypatch):
    monkeypatch.setattr("momentkv.cli._dispatch", Mock(side_effect=error))
    monkeypatch.setattr("os.dup2", Mock())
    assert main(["methods"]) == status
    assert "Traceback" not in capfd.readouterr().err


def test_a_missing_extra_names_its_installation(capsys, monkeypatch):
    missing = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    monkeypatch.setattr("momentkv.cli._dispatch", Mock(side_effect=missing))
    assert "pip install 'momentkv[hf]'" in failure(capsys, "generate", "demo", "--prompt", "w1")


def test_methods_names_every_method_paper_and_preset(capsys):
    assert main(["methods"]) == 0
    table = capsys.readouterr().out
    for name, method in METHODS.items():
        assert f"│ {name} " in table
        assert method.paper in table
        assert all(f"{preset}: " in table for preset in method.presets)


def test_methods_as_json(capsys):
    assert main(["methods", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["momentkv"]["settings"]["correction"] == "first"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--method", "snapvk"], ["'snapvk'", "snapkv", "momentkv"]),
        (["--method", "snapkv:none"], ["'none'", "original", "kvcf"]),
        (["--preset", "nope"], ["'nope'", "paper"]),
        (["--budget", "12parsecs"], ["'12parsecs'", "16MiB", "128te"]),
        (["--budget", "20"], ["budget=20", "37"]),
        (["--set", "windw=64"], ["'windw'", "window", "kernel"]),
        (["--set", "window"], ["'window'", "name=value"]),
        (["--set", "alpha=much"], ["alpha='much'"]),
        (["--set", "kernel=4"], ["kernel=4", "odd"]),
        (["--prompt-file", "/no/such.txt"], ["'/no/such.txt'", "No such file"]),
        (["--load-cache", "/no/such.cache"], ["/no/such.cache"]),
        (["--save-cache", "/no/such/folder/x"], ["/no/such/folder/x"]),
        (["--temperature", "-1"], ["'-1'", "at least 0"]),
        (["--max-new-tokens", "some"], ["'some'", "whole number"]),
        (["--max-new-tokens", "0"], ["--save-cache"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_bad_arguments_are_one_line_before_any_model_is_looked_for(args, named, capsys):
    line = failure(capsys, "generate", "/no/such/model", "--prompt", "w1", *args)
    assert all(word in line for word in named), line
    assert "/no/such/model" not in line


def test_bad_input(tiny, tmp_path, capsys):
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_text(" \n")
    assert "UTF-8" in failure(capsys, "generate", tiny, "--prompt-file", tmp_path / "latin1")
    assert "empty" in failure(capsys, "generate", tiny, "--prompt-file", tmp_path / "empty")
    assert "no prompt" in failure(capsys, "generate", tiny)
    assert "/no/such/model" in failure(capsys, "generate", "/no/such/model", "--prompt", "w1")
    (tmp_path / "short").write_text(DOCUMENT)
    assert "at least 600" in failure(capsys, "demo", "--model", tiny, "--document", tmp_path / "short")


def test_a_model_without_a_chat_template(tiny, tmp_path, capsys):
    bare = shutil.copytree(tiny, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    assert "--no-chat-template" in failure(capsys, "generate", bare, "--prompt", "w1")
    assert main(["generate", str(bare), "--prompt", "w1 w2", "--no-chat-template", "--max-new-tokens", "2"]) == 0


def test_stdout_holds_the_generated_text_alone(tiny, document, capsys):
    assert main(["generate", str(tiny), "--prompt-file", document, "--report", *BUDGET]) == 0
    out, err = capsys.readouterr()
    words = out.split()
    assert 1 <= len(words) <= 8
    assert all(word in SPECIAL or word.startswith("w") for word in words)
    assert "momentkv, budget 48: " in err and "summary" in err


def test_a_prompt_that_fits_is_answered_as_by_the_full_cache(generate, document):
    tokens = ("--prompt-file", document, "--max-new-tokens", 8)
    assert generate(*tokens, "--budget", 400) == generate(*tokens, "--method", "full")


def test_the_prompt_may_come_from_standard_input(generate, document, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DOCUMENT.encode())))
    assert generate("--prompt", "-", *BUDGET) == generate("--prompt-file", document, *BUDGET)


def test_a_seed_repeats_a_sample(generate, document):
    sample = ("--prompt-file", document, *BUDGET, "--temperature", 2, "--top-p", 0.9)
    assert generate(*sample, "--seed", 1) == generate(*sample, "--seed", 1)
    assert len({generate(*sample, "--seed", seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("options", [[], ["--prefill-chunk", "40"]])
@pytest.mark.parametrize("template", [[], ["--no-chat-template"]])
@pytest.mark.parametrize("question", [[], ["--prompt", " w7 w8 w9"]])
def test_a_saved_prompt_continues_as_without_the_detour(generate, document, tmp_path, options, template, question):
    saved = tmp_path / "cache"
    start = ("--prompt-file", document, *BUDGET, *template, *options)
    direct = generate(*start, *question, "--save-cache", saved)
    assert direct.strip()
    if question or not template:  # else there is nothing to continue with
        assert generate("--load-cache", saved, *question, *template, "--max-new-tokens", 8) == direct
    if not question:
        return
    assert generate(*start, "--save-cache", saved, "--max-new-tokens", 0) == ""
    assert generate("--load-cache", saved, *question, *template, "--max-new-tokens", 8) == direct


def test_what_is_saved_is_the_open_turn(generate, document, tmp_path):
    """The file holds the conversation up to the end of the document, so that a question can still join it."""
    from momentkv.hf import MomentCache
    from momentkv.hf.models import load

    generate("--prompt-file", document, "--save-cache", tmp_path / "cache", *BUDGET)
    model, tokenizer = load(str(generate.model))
    cache = MomentCache.load(tmp_path / "cache", model.config)
    assert tokenizer.decode(cache.token_ids[0].tolist()) == "<user> " + DOCUMENT
    assert cache.get_seq_length() == cache.token_ids.shape[1]


def test_a_saved_prompt_is_not_taken_for_another(generate, document, tmp_path, capsys):
    saved = tmp_path / "cache"
    generate("--prompt-file", document, "--save-cache", saved, *BUDGET)
    load = ("generate", generate.model, "--load-cache", saved, "--prompt", "w1")
    assert "budget 48, not 64" in failure(capsys, *load, "--budget", 64)
    assert "'snapkv'" in failure(capsys, *load, "--method", "snapkv")
    assert "--set" in failure(capsys, *load, "--set", "window=8")
    saved.write_bytes(saved.read_bytes()[:-100])
    assert str(saved) in failure(capsys, *load)


def test_a_prompt_beyond_the_models_length_is_warned_about(tiny, document, capsys):
    assert main(["generate", str(tiny), "--prompt", "w1", "--max-new-tokens", "512", "--budget", "48"]) == 0
    assert "more than the 512" in capsys.readouterr().err


def test_the_demo_as_json(capsys, monkeypatch):
    if not (cache_dir() / DEMO_NAME / "model.safetensors").is_file():
        pytest.skip("the demo model is not built: python -m momentkv.hf.models")
    monkeypatch.setattr("momentkv.hf.demo.CONTINUATION", 16)  # for the sake of time
    monkeypatch.setattr("momentkv.hf.demo.ANSWER", 4)
    assert main(["demo", "--json", "--tokens", "800", "--offline"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["full cache", "StreamingLLM", "SnapKV", "Ada-KV", "MomentKV", "MomentKV, equal bytes"]
    full, moment, equal = rows["full cache"], rows["MomentKV"], rows["MomentKV, equal bytes"]
    assert abs(full["kl"]) < 1e-9 and full["agreement"] == 1 and full["share_of_full"] == 1
    assert result["document_tokens"] == 800 and 0.4 < result["needle_depth"] < 0.6
    for row in rows.values():
        assert 0 < row["nll"] < 20 and row["ms_per_token"] > 0
        assert row is full or (0 < row["kl"] < 10 and 0 < row["agreement"] < 1)
    assert moment["tokens_per_head"] == rows["SnapKV"]["tokens_per_head"] == 128
    assert moment["bytes"] > rows["SnapKV"]["bytes"] >= equal["bytes"]
    assert moment["summary_bytes"] == equal["summary_bytes"] > 0
