"""Kernels that a script compiles for all architectures in one process: it takes some seconds to import."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]


def compiled(script: str, archs: Iterable[int], cache: Path) -> dict[int, list[dict[str, Any]]]:
    """By architecture what a script beside this file says of each kernel."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, Path(__file__).with_name(script), *map(str, archs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    return {arch: [kernel for kernel in kernels if kernel["arch"] == arch] for arch in archs}
