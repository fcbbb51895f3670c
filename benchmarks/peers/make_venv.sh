#!/usr/bin/env bash
# Make benchmarks/peers/.venv-kvpress: kvpress 0.5.5 with the transformers it needs, apart from the project's own
# environment, whose transformers is newer. make_venv.sh [PYTHON], default python3.11. Some two minutes, 1.5 GB.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=$here/.venv-kvpress/bin/python

[ -x "$python" ] || "${1:-python3.11}" -m venv "$here/.venv-kvpress"
# torch first and fixed in a constraint: what pip chooses by itself brings several gigabytes of CUDA along
"$here/../../scripts/install_torch.sh" "$python"
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
"$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$constraint"
"$python" -m pip install --quiet --constraint "$constraint" "kvpress==0.5.5" "transformers<5.3"
"$python" -c 'import torch, transformers, kvpress; print("transformers", transformers.__version__, "torch", torch.__version__)'
