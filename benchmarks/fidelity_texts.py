"""Write the six texts of the fidelity results from a data folder laid out as for `momentkv eval --data`.

    python benchmarks/fidelity_texts.py DATA OUT

DATA/longtext/ has two novels of Project Gutenberg and WikiText-2's validation part, DATA/ruler/ the essays that RULER
uses as haystack, DATA/longbench/ the rows whose contexts make the code and the meetings.
"""

import json
import re
import sys
from pathlib import Path

COPIED = {
    "novel": "moby_dick_pg2701.txt",
    "novel2": "pride_and_prejudice_pg1342.txt",
    "encyclopedia": "wikitext2_valid.txt",
}
CONTEXTS = {"code": "repobench-p", "meetings": "qmsum"}


def without_licence(text: str) -> str:
    """What Project Gutenberg wraps its books in is no part of them."""
    body = re.split(r"\*\*\* (?:START|END) OF TH[EIS]+ PROJECT GUTENBERG EBOOK [^\n]*\n", text)
    return body[1] if len(body) > 2 else text


def texts(data: Path) -> dict[str, str]:
    """Name to text."""
    found = {
        name: without_licence((data / "longtext" / file).read_text(encoding="utf-8")) for name, file in COPIED.items()
    }
    found["essays"] = json.loads((data / "ruler" / "PaulGrahamEssays.json").read_text(encoding="utf-8"))["text"]
    for name, task in CONTEXTS.items():
        lines = (data / "longbench" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
        found[name] = "\n\n".join(json.loads(line)["context"] for line in lines)
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts(Path(sys.argv[1])).items():
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{out / name}.txt: {len(text):,} characters")
