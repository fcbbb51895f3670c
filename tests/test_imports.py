"""Imports point one way, as the table of docs/design.md says, and importing the core stays cheap."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "momentkv"
ALWAYS = {*sys.stdlib_module_names, "torch", "jaxtyping"}


class Row(NamedTuple):
    level: int
    modules: list[str]
    outside: set[str]
    each_other: bool


def table() -> list[Row]:
    section = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("\n## Imports\n")[2]
    cells = re.findall(r"^\| (\d+) \|(.*)\|(.*)\| (yes|no) \|$", section.partition("\n## ")[0], re.MULTILINE)
    names = re.compile(r"`([^`]+)`")
    return [Row(int(n), names.findall(own), set(names.findall(out)), each == "yes") for n, own, out, each in cells]


ROWS = table()


def name_of(path: Path) -> str:
    """`policies.base` for policies/base.py, `policies` for its package, `momentkv` for the whole."""
    parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
    return ".".join(parts) or "momentkv"


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def row_of(module: str) -> Row:
    by_name = [row for row in ROWS if module in row.modules]
    rows = by_name or [row for row in ROWS if any(fnmatch(module, pattern) for pattern in row.modules)]
    assert len(rows) == 1, f"{module} must be in one row of the table in docs/design.md, not in {len(rows)}"
    return rows[0]


def imported(source: str) -> set[str]:
    """Every module that a source names in an import, ours without the leading `momentkv.`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole.removeprefix("momentkv.") in FILES else node.module or "")
    return {name.removeprefix("momentkv.") for name in found}


def breaches(module: str, source: str) -> list[str]:
    own, wrong = row_of(module), []
    for name in imported(source):
        if name in FILES:
            other = row_of(name)
            fine = other.level < own.level or (other is own and own.each_other)
        else:
            fine = name.partition(".")[0] in ALWAYS | own.outside
        if not fine:
            wrong.append(f"{module} imports {name}")
    return wrong


def test_the_table_names_only_what_exists():
    assert [row.level for row in ROWS] == list(range(1, len(ROWS) + 1)) and len(ROWS) > 5
    for pattern in (p for row in ROWS for p in row.modules):
        assert any(fnmatch(module, pattern) for module in FILES), f"no module is called {pattern}"


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module):
    assert not breaches(module, FILES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("decode", "import transformers"),
        ("decode", "def f():\n    from transformers import Cache"),
        ("layer", "from momentkv.hf import cache"),
        ("state", "from momentkv import moments"),
        ("policies.tova", "from momentkv.policies.snapkv import SnapKV"),
        ("policies.tova", "import momentkv"),
        ("hf.cache", "from momentkv.evals import attention_error"),
        ("evals", "import transformers"),
        ("cli", "import transformers"),
        ("summary", "import numpy"),
    ],
)
def test_a_breach_is_found(module, source):
    assert breaches(module, source)


def test_importing_the_core_loads_torch_and_nothing_heavier():
    code = """
import sys, torch, jaxtyping
heavy = ("transformers", "safetensors", "rich", "triton", "matplotlib", "datasets", "tokenizers", "huggingface_hub")
before = set(sys.modules)
import momentkv, momentkv.evals, momentkv.cli
loaded = set(sys.modules) - before
assert not loaded & set(heavy), loaded & set(heavy)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
