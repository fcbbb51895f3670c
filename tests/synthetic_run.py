"""Folders of made-up runs, as an evaluation writes them."""

import json
from pathlib import Path

import numpy as np

SCHEMA = {
    *("task", "protocol", "method", "preset", "budget", "level", "match", "corrected", "tokens_per_head", "bytes"),
    *("summary_bytes", "token_equivalents", "peak_bytes", "metric", "value", "n", "ci_low", "ci_high", "baseline"),
    *("difference", "difference_low", "difference_high"),
}
TOKEN = 30 * 3 * 2 * 64 * 4  # bytes of one exact token of all heads of a small model
SUMMARY = 33 * TOKEN
PLAIN = {"random": 0.1, "streaming": 0.2, "knorm": 0.15, "h2o": 0.45, "tova": 0.4, "snapkv": 0.55, "adakv": 0.6}
CORRECTED = {("momentkv", None): 0.68, ("momentkv", "paper"): 0.66}


def variant(method, preset=None, level="128", matched=None, corrected=False, prompt=4096, summary=SUMMARY):
    """The fields of a row that say what was held."""
    full = method == "full"
    name = f"{method}:{preset}" if preset else method
    level = "full" if full else level
    tokens = prompt if full else min(prompt, int(level) + (summary // TOKEN if matched else 0))
    own = summary if corrected else 0
    size = tokens * TOKEN + own
    return {
        "variant": f"{name}@{level}" + (f" (bytes of {matched})" if matched else ""),
        "method": method,
        "preset": preset,
        "budget": "full" if full else f"{size}B" if matched else level,
        "level": level,
        "match": "bytes" if matched else "tokens",
        "matched": matched,
        "corrected": corrected,
        "tokens_per_head": float(tokens),
        "bytes": size,
        "summary_bytes": own,
        "token_equivalents": size / TOKEN,
        "peak_bytes": size + prompt * TOKEN // 30,
    }


def variants(levels=("128", "256", "512"), plain=PLAIN, corrected=CORRECTED):
    """Pairs of a row's fields and how well the variant does, from 0 to 1."""
    found = [(variant("full"), 0.9)]
    for level in levels:
        gain = 0.06 * np.log2(int(level) / 128)
        found += [(variant(m, level=level), q + gain) for m, q in plain.items()]
        for (method, preset), q in corrected.items():
            summary = SUMMARY * (2 if preset else 1)
            name = f"{method}:{preset}" if preset else method
            found.append((variant(method, preset, level, corrected=True, summary=summary), q + gain))
            for m in ("snapkv", "adakv"):
                found.append((variant(m, level=level, matched=name, summary=summary), plain[m] + gain + 0.02))
    return found


def scored(task, samples, whose, metric="recall", seed=0, facts=None, protocol="aware", binary=True):
    """Rows of a generation task: samples differ in how hard they are, so variants agree on most of them."""
    rng = np.random.default_rng([seed, *task.encode()])
    rows = []
    for i in range(samples):
        hard, own = rng.random(), facts(i) if facts else {}
        for fields, quality in whose:
            easy = quality - 0.25 * own.get("length", 0) / 8192 + 0.05 * rng.standard_normal()
            score = float(hard < easy) if binary else float(np.clip(easy - hard / 2, 0, 1))
            rows.append(
                {
                    "task": task,
                    "sample": f"{i}",
                    "protocol": protocol,
                    **fields,
                    "values": {metric: score},
                    "pred": f"The answer is {i}." if score else "I do <b>not</b> know.",
                    "answers": [f"{i}"],
                    "facts": own,
                    "prompt_tokens": 4000,
                    "new_tokens": 5,
                    "seconds": 2.5,
                }
            )
    return rows


def fidelity(text, samples, whose, seed=0, protocol="aware"):
    """Rows of a text: distances fall with quality; the full cache has no attention error."""
    rng = np.random.default_rng([seed, *text.encode()])
    rows = []
    for i in range(samples):
        hard = rng.lognormal(0, 0.4)
        for fields, quality in whose:
            kl = 0.0 if fields["method"] == "full" else hard * float(np.exp(1 - 4 * quality + 0.1 * rng.normal()))
            values = {"kl": kl, "nll": 2.8 + kl, "top1": 1 / (1 + kl), "kl_median": kl / 3, "kl_p90": kl * 3}
            if fields["method"] != "full":
                values |= {"error": kl / 2, "worse_share": 0.1 * fields["corrected"], "error_by_head": [[0.1], [0.2]]}
            shared = {"task": f"fidelity/{text}", "sample": f"{i}", "protocol": protocol, "facts": {"length": 4096}}
            rows.append({**shared, **fields, "values": values, "prompt_tokens": 4096, "new_tokens": 0, "seconds": 9.0})
    return rows


def write_run(folder: Path, rows, errors=(), **spec) -> Path:
    """A run's folder with these rows; `spec` changes what defines it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    if errors:
        (folder / "errors.jsonl").write_text("".join(json.dumps(e) + "\n" for e in errors), encoding="utf-8")
    said = {"model": "models/tiny", "protocol": "aware", "seed": 42, "versions": {"momentkv": "0.1.0"}} | spec
    (folder / "spec.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


WHOSE = variants(("128", "256"))


def rows_of(scores: dict[str, list[float]], task: str = "ruler/vt", **more) -> list[dict]:
    """Rows with these scores: `adakv` is plain, `momentkv` corrected."""
    fields = {"adakv": variant("adakv"), "momentkv": variant("momentkv", corrected=True), "full": variant("full")}
    rows = []
    for method, values in scores.items():
        for i, value in enumerate(values):
            shared = {"task": task, "sample": f"{i}", "protocol": "aware", "values": {"recall": value}}
            rows.append({**shared, **fields[method], **more})
    return rows


def mixed_run(folder: Path) -> Path:
    """A run of all families with one variant short of two samples, one error, and text that is HTML."""
    rows = [row for name in ("vt", "niah_single_1") for row in scored(f"ruler/{name}", 12, WHOSE)]
    rows = [r for r in rows if not (r["task"] == "ruler/vt" and r["method"] == "h2o" and r["sample"] in "12")]
    for name in ("qasper", "hotpotqa", "multifieldqa_zh"):
        rows += scored(f"longbench/{name}", 10, WHOSE, "f1", binary=False)
    rows += scored("longbench-e/trec", 9, WHOSE, "accuracy", facts=lambda i: {"bucket": ("0-4k", "4-8k", "8k+")[i % 3]})
    rows += scored("niah/grid", 8, WHOSE, facts=lambda i: {"length": 1024 * (1 + i % 2), "depth": (i // 2) / 3})
    rows += [row for text in ("one", "two") for row in fidelity(text, 2, WHOSE)]
    errors = [
        {"task": "ruler/vt", "sample": "1", "error": "<script>alert(1)</script>", "kind": "out of memory"},
        {"task": "ruler/vt", "sample": "5", "error": "mended since", "kind": "OSError"},
    ]
    return write_run(folder, rows, errors, model="models/<i>tiny")
