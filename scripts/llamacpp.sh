#!/usr/bin/env bash
# llama-cpp-python, which comes as source: compiled once, for minutes, with Debian's compiler where there is none.
#
#   scripts/llamacpp.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

if "$venv/bin/python" -c 'import sys, importlib.util as found; sys.exit(not found.find_spec("llama_cpp"))'; then
    echo "Looking whether llama-cpp-python is the one of constraints.txt ..."
else
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        echo "llama.cpp needs a C++ compiler; installing Debian's package ..." >&2
        sudo=$([ "$(id -u)" = 0 ] || echo "sudo -n")
        { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
            g++; } >/dev/null || {
            echo "g++ could not be installed: install it (Debian: apt-get install g++), then try again." >&2
            exit 1
        }
    fi
    echo "Compiling llama.cpp (once, some minutes) ..."
fi
# Editable, as it is already: another form would be a copy of this folder that later changes do not reach.
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet -c constraints.txt --editable ".[llamacpp]"
