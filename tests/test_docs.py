"""What the documents say can be run is run, and what they point to is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import momentkv
from conftest import build

ROOT = Path(__file__).parent.parent
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
WORKPLACE = ("..", "shared"), ("", "work", ""), ("sub" + "agent",)  # joined with "/"; this file must not match
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SMALL = {
    "quickstart.py": ["--tokens", "200", "--new", "4"],
    "compress_once_ask_many.py": ["--tokens", "300", "--new", "4"],
    "compare_methods.py": ["--tokens", "200", "--next", "4"],
    "chat_loop.py": ["--new", "30"],
}


def run(*command: str, timeout: float = 120) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A random Llama with a tokenizer of whole words and a chat template, as a checkpoint."""
    import tokenizers
    import transformers

    words = ["<pad>", "<s>", "</s>", "<unk>", "[", "]", "user", "assistant", "the", "of", "a", "is", "it", "to", "in"]
    words += [".", ",", "?", ":", "Question", "Answer"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    build("llama", vocab_size=len(words)).save_pretrained(folder)
    return folder


def test_every_example_is_run():
    assert {p.name for p in (ROOT / "examples").glob("*.py")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_examples_run(name, model_folder):
    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert source.startswith('"""') and len(source.splitlines()) < 60
    out = run(f"examples/{name}", str(model_folder), *SMALL[name])
    held = set(re.findall(r"([\d,]+) bytes held", out))
    assert "bytes" in out and (name != "chat_loop.py" or len(held) == 1)


def test_extending_runs(tmp_path):
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    script = tmp_path / "extending.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), encoding="utf-8")
    run(str(script))


def links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    return [x for x in found if not re.match(r"[a-z]+:", x)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_resolve(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_equations_that_the_code_cites_are_in_math():
    math = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
    numbered = {int(n) for n in re.findall(r"^    .*\((\d+)\)$", math, re.MULTILINE)}
    sections = {int(n) for n in re.findall(r"^## (\d+)\. ", math, re.MULTILINE)}
    for path in (ROOT / "src").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for first, last in re.findall(r"\bEqs?\. (\d+)(?:-(\d+))?", source):
            assert set(range(int(first), int(last or first) + 1)) <= numbered, f"{path.name}: Eq. {first}"
        for section in re.findall(r"docs/math\.md, section (\d+)", source):
            assert int(section) in sections, f"{path.name}: section {section}"


def test_public_names_are_documented():
    for name in momentkv.__all__:
        x = getattr(momentkv, name)
        if callable(x):  # dataclasses and named tuples write a docstring of their own, which says nothing
            assert x.__doc__ and not x.__doc__.startswith(f"{x.__name__}("), name
    assert all(policy.__doc__ and not policy.__doc__.startswith("(") for policy in momentkv.POLICIES.values())
    assert all(method.about and method.paper for method in momentkv.METHODS.values())


def test_no_file_mentions_the_place_where_it_was_written():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    words = ["/".join(parts) for parts in WORKPLACE]
    for name in listed.stdout.splitlines():
        path = ROOT / name
        raw = path.read_bytes() if path.is_file() else b"\0"
        if b"\0" not in raw:
            text = raw.decode("utf-8", errors="replace")
            assert not (bad := [w for w in words if w in text]), f"{name}: {bad}"
