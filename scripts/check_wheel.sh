#!/usr/bin/env bash
# The built wheel works outside the repository: typed, importable, with its command.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m build --wheel --outdir "$place/dist" . >"$place/log" 2>&1 || { cat "$place/log"; exit 1; }
"$python" -m pip install -q --no-deps --target "$place/site" "$place"/dist/*.whl
cd "$place"
PYTHONPATH=$place/site "$python" - <<PY
import pathlib, momentkv, momentkv.cli, momentkv.hf
home = pathlib.Path(momentkv.__file__).parent
assert home.is_relative_to("$place"), home
assert (home / "py.typed").is_file()
assert momentkv.cli.main(["methods", "--json"]) in (0, None)
PY
echo "wheel: works outside the repository"
