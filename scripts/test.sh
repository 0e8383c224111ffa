#!/usr/bin/env bash
# Runs the tests but those of `make kernels`, `make long`, `make storms`, `make llamacpp` and `make browser`. The model tests take the imported demo model from PREREAD_TEST_MODEL (`make test` sets it).
set -euo pipefail
cd "$(dirname "$0")/.."
# Tests start many small processes side by side: threads that spin while they wait would take each other's cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
# Container images often set it. Every process that a test starts would then compile every module again.
unset PYTHONDONTWRITEBYTECODE
scripts/servers.sh
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
# Files share the cores, with two more at a time than there are: some wait for processes. One thread each. A test may take
# several times as long as by itself, and its time limit is there for what hangs.
cores=$(.venv/bin/python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
status=0
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not alone and not storm and not long" --ignore tests/service/engine/exl2_engine --ignore tests/browser --ignore tests/llamacpp -n "${TEST_WORKERS:-$((cores < 8 ? cores + 2 : 8))}" \
    --dist loadfile --no-loadscope-reorder -o timeout=600 --durations=15 || status=$?
# These watch clocks and memory, and have the machine and all its threads for themselves.
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.alone' tests)
.venv/bin/python -m pytest -m alone "${files[@]}" || status=$?
exit "$status"
