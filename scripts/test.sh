#!/usr/bin/env bash
# Runs every test. The model tests take the imported demo model from PREREAD_TEST_MODEL (`make test` sets it).
set -euo pipefail
cd "$(dirname "$0")/.."
# Tests start many small processes side by side: threads that spin while they wait would take each other's cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec .venv/bin/python -m pytest "$@"
