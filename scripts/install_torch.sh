#!/usr/bin/env bash
# Install torch into the environment of a Python: scripts/install_torch.sh [PYTHON], default .venv/bin/python.
# A torch that imports already is left alone. MOMENTKV_TORCH names another version than 2.13.0.
set -euo pipefail

python=${1:-.venv/bin/python}
version=${MOMENTKV_TORCH:-2.13.0}

# quietly, as a failure only means that the next source is tried
try() { "$python" -m pip install --quiet --retries 1 --timeout 60 "$@" 2>/dev/null; }

if "$python" -c 'import torch' 2>/dev/null; then
    echo "torch: there already"
elif [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
    # Without an NVIDIA GPU the CPU build saves gigabytes: one that pip finds by itself, else PyTorch's CPU index.
    # The last resort is what PyPI offers, which also runs without a GPU.
    try "torch==$version+cpu" ||
        try "torch==$version" --index-url https://download.pytorch.org/whl/cpu ||
        "$python" -m pip install "torch==$version"
else
    # With a GPU, or where PyPI's only build is the CPU or Metal one
    "$python" -m pip install "torch==$version"
fi
"$python" -c 'from importlib.metadata import version; print("torch", version("torch"))'
