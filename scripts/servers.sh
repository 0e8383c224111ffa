#!/usr/bin/env bash
# What tests start themselves: a real Redis, a real PostgreSQL, and Tesseract for scanned pages. Installs
# Debian's packages where they lack.
set -euo pipefail

# install PACKAGE: or end, with a sentence.
install() {
    echo "The tests need $1; installing Debian's package ..." >&2
    local sudo
    sudo=$([ "$(id -u)" = 0 ] || echo "sudo -n")
    { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install --yes "$1"; } >/dev/null || {
        echo "$1 could not be installed: install it (Debian: apt-get install $1), then try again." >&2
        exit 1
    }
}

command -v redis-server >/dev/null || install redis-server
# Debian has PostgreSQL's programs beside the path.
command -v initdb >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || install postgresql
command -v tesseract >/dev/null || install tesseract-ocr
