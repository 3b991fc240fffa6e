#!/usr/bin/env bash
# Run the tests in the environment of scripts/setup_env.sh (made if need be). Arguments go to pytest:
#
#   bash scripts/test.sh                    all of them
#   bash scripts/test.sh tests/recipe -k override
#
# --python-env current, as the first argument, uses the active environment.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SETUP=()
case "${1:-}" in
    --python-env) SETUP=("$1" "${2:-}"); shift $(($# > 1 ? 2 : 1)) ;;
    --python-env=*) SETUP=("$1"); shift ;;
esac

PYTHON="$(bash "$ROOT/scripts/setup_env.sh" ${SETUP[@]+"${SETUP[@]}"})"
cd "$ROOT"
CORES="$("$PYTHON" -c 'import os; print(min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), 4))')"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$CORES}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-${OMP_NUM_THREADS:-$CORES}}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

# -v takes back the -q of pyproject.toml: a line for each file with a dot for each test. The summary comes last.
exec "$PYTHON" -m pytest -v --durations=15 --durations-min=5 "$@"
