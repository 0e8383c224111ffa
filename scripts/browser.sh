#!/usr/bin/env bash
# What the tests of the page need beside the others: Debian's Chromium, and the Python packages that drive it.
#
#   scripts/browser.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then
    echo "The tests need chromium; installing Debian's package ..." >&2
    sudo=$([ "$(id -u)" = 0 ] || echo "sudo -n")
    # Text in Chinese is only measured with a font that has it.
    { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        chromium fonts-dejavu-core fonts-droid-fallback; } >/dev/null || {
        echo "chromium could not be installed: install it (Debian: apt-get install chromium), then try again." >&2
        exit 1
    }
fi
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet -c constraints.txt --group browser
