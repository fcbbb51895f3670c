"""What LongBench's prompts are made of: lm-eval's templates, and rows from a folder or the hub."""

import re
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from momentkv.evals.json_lines import objects, text, texts
from momentkv.evals.task import TaskError
from momentkv.evals.tasks.longbench_table import TASKS

HUB = "THUDM/LongBench"
# lm-eval has one newline between context and question here, LongBench two
_BLANK_LINE = ("triviaqa", "samsum")
# lm-eval drops the white space at the end of these
_ENDS = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}


@dataclass(frozen=True)
class Row:
    """One line of LongBench's files. length: in words, or characters of Chinese."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]
    length: int

    @classmethod
    def of(cls, raw: dict[str, Any], where: str, classes: bool) -> "Row":
        """Checked. classes: whether the task needs `all_classes`."""
        length = raw.get("length")
        if not isinstance(length, int) or isinstance(length, bool):
            raise TaskError(f"{where}: 'length' must be a whole number; got {raw.get('length')!r}")
        ident, context, question = (text(raw, field, where) for field in ("_id", "context", "input"))
        named = texts(raw, "all_classes", where) if classes else ()
        return cls(ident, context, question, texts(raw, "answers", where), named, length)


@lru_cache(maxsize=len(TASKS))
def template(task: str) -> tuple[str, str]:
    """LongBench's own prompt: what stands before the context, and what follows, with `{{question}}` in it.

    Raises:
        TaskError: lm-eval is not installed or has no such template.
    """
    found = find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise TaskError("LongBench's templates are lm-eval's: pip install 'momentkv[eval]'")
    import yaml

    path = Path(found.submodule_search_locations[0]) / "tasks" / "longbench" / f"{task}.yaml"
    try:
        # without the tags that name lm-eval's functions
        prompt = yaml.safe_load(path.read_text(encoding="utf-8").replace("!function", ""))["doc_to_text"]
        before, middle, after = prompt.partition("{{context}}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise TaskError(f"LongBench: no template in {str(path)!r} (made for lm_eval 0.4.13): {error!r}") from error
    if not middle:
        raise TaskError(f"LongBench: the template in {str(path)!r} has no context (made for lm_eval 0.4.13)")
    if task in _BLANK_LINE:
        after = re.sub(r"^\s*", "\n\n", after)
    if task in _ENDS:
        after = after.rstrip() + _ENDS[task]
    return before, after


def rows_of(task: str, data: Path | None, extended: bool) -> list[Row]:
    """The rows in the order of the file: `data/longbench/<task>.jsonl`, or LongBench's archive on the hub.

    Args:
        extended: LongBench-E: `data/longbench_e/<task>.jsonl`.

    Raises:
        TaskError: they cannot be had, or one is damaged.
    """
    raw, name = _local(task, data, extended) if data is not None else _from_hub(f"{task}_e" if extended else task)
    rows: dict[str, Row] = {}
    for where, found in objects(raw, name):
        row = Row.of(found, where, TASKS[task][0] == "classification")
        if row.id in rows:
            raise TaskError(f"{where}: the '_id' {row.id!r} was there before")
        rows[row.id] = row
    return list(rows.values())


def _local(task: str, data: Path, extended: bool) -> tuple[bytes, str]:
    path = data / ("longbench_e" if extended else "longbench") / f"{task}.jsonl"
    try:
        return path.read_bytes(), str(path)
    except FileNotFoundError:
        raise TaskError(f"LongBench: {str(path)!r} is not there") from None
    except OSError as error:
        raise TaskError(f"LongBench: {str(path)!r} cannot be read: {error}") from error


def _from_hub(name: str) -> tuple[bytes, str]:
    """From the archive itself: `datasets` no longer runs the script that the hub has for it."""
    try:
        from huggingface_hub import hf_hub_download

        archive = hf_hub_download(HUB, "data.zip", repo_type="dataset")
        with zipfile.ZipFile(archive) as files:
            return files.read(f"data/{name}.jsonl"), f"{HUB} {name}.jsonl"
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or repr(error)
        raise TaskError(f"LongBench: {name} cannot be had from the hub ({why}): pass --data DIR") from error
