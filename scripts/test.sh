#!/usr/bin/env bash
# Runs every test. The model tests take the imported demo model from PREREAD_TEST_MODEL (`make test` sets it).
set -euo pipefail
cd "$(dirname "$0")/.."
# Tests start many small processes side by side: threads that spin while they wait would take each other's cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
# These only compute or read files, one thread each (most of it in Triton's interpreter): two at a time. The others watch
# clocks, processes and memory, and have the machine for themselves.
engine=tests/service/engine
computing=(
    "$engine/exl2_engine" "$engine/torch_engine" "$engine/models" "$engine/fetch" "$engine/scheduler"
    tests/benchmarks tests/gpu tests/cache_store tests/docs tests/service/db
)
status=0
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile "${computing[@]}" || status=$?
.venv/bin/python -m pytest "${computing[@]/#/--ignore=}" || status=$?
exit "$status"
