#!/usr/bin/env bash
# Runs every test. The model tests take the imported demo model from PREREAD_TEST_MODEL (`make test` sets it).
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m pytest "$@"
