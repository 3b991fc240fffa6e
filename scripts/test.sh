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
# First arguments: --engine, --llama or --checks; --python-env current to use the active environment for the toolkit; and
# --workers N for tests in N processes that share the cores (2 for all tests where there are two cores and pytest-xdist,
# otherwise 1).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SETUP=() ENGINE=() VLLM="" LLAMA="" CHECKS="" WORKERS=""
while :; do
    case "${1:-}" in
        --python-env) SETUP=("$1" "${2:-}"); shift $(($# > 1 ? 2 : 1)) ;;
        --python-env=*) SETUP=("$1"); shift ;;
        --workers) WORKERS="${2:-none}"; shift $(($# > 1 ? 2 : 1)) ;;
        --workers=*) WORKERS="${1#*=}" WORKERS="${WORKERS:-none}"; shift ;;
        --engine) ENGINE+=("$1"); VLLM=yes; shift ;;
        --llama) ENGINE+=("$1"); LLAMA=yes; shift ;;
        --checks) CHECKS=only; shift ;;
        -h | --help) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) break ;;
    esac
done

case "$WORKERS" in
    *[!0-9]* | 0*) echo "error: --workers takes a number of processes, found $WORKERS" >&2; exit 2 ;;
esac

PYTHON="$(bash "$ROOT/scripts/setup_env.sh" ${SETUP[@]+"${SETUP[@]}"})"
[ -z "$VLLM" ] || bash "$ROOT/scripts/setup_vllm_cpu.sh" > /dev/null
[ -z "$LLAMA" ] || bash "$ROOT/scripts/setup_llama_cpp.sh" > /dev/null
cd "$ROOT"
CORES="$("$PYTHON" -c 'import os; print(min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), 4))')"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# Most tests keep one core busy, or wait.
if [ -z "$WORKERS" ] && [ $# -eq 0 ] && [ "$CORES" -gt 1 ] && "$PYTHON" -c "import xdist" 2> /dev/null; then WORKERS=2; fi
SIDE_BY_SIDE=()
if [ "${WORKERS:-1}" -gt 1 ]; then
    SIDE_BY_SIDE=(-n "$WORKERS")
    CORES=$((CORES > WORKERS ? CORES / WORKERS : 1))
fi
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
exec "$PYTHON" -m pytest -v --durations=15 --durations-min=5 ${SIDE_BY_SIDE[@]+"${SIDE_BY_SIDE[@]}"} \
    ${ENGINE[@]+"${ENGINE[@]}"} "$@"
