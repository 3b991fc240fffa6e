#!/usr/bin/env bash
# Train an EAGLE-3 head, measure its acceptance length, export it.
#
#   bash train_eagle3_and_export.sh                       the quick start: bundled target and conversations
#   bash train_eagle3_and_export.sh --base_model NAME --data FILE.jsonl [--recipe FILE] [section.key=value ...]
#
# --help lists all options. --python-env current uses the active Python environment instead of making .venv.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SETUP=() REST=()
while [ $# -gt 0 ]; do
    case "$1" in
        --python-env) SETUP+=("$1" "${2:-}"); shift $(($# > 1 ? 2 : 1)) ;;
        --python-env=*) SETUP+=("$1"); shift ;;
        *) REST+=("$1"); shift ;;
    esac
done

# --help makes no environment: without one, what stands above is all that can be said.
case " ${REST[*]-} " in
    *" -h "* | *" --help "*)
        if [ ! -x "$ROOT/.venv/bin/python" ] && [ ${#SETUP[@]} -eq 0 ]; then
            sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit 0
        fi ;;
esac

PYTHON="$(bash "$ROOT/scripts/setup_env.sh" ${SETUP[@]+"${SETUP[@]}"})"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m modelopt_eagle train-and-export ${REST[@]+"${REST[@]}"}
