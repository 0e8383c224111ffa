"""How many threads compute where nobody says: llama.cpp's own number is four, on any machine."""

import os
from pathlib import Path

import psutil

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The share of processor time that a container has."""


def default_threads(quota: Path = QUOTA) -> int:
    """`OMP_NUM_THREADS` where it is set, as torch has it; else one for each core that this process may use. More would
    spin while they wait for each other."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    if value.isdecimal() and int(value):
        return int(value)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed, _share(quota, allowed)))


def _share(quota: Path, allowed: int) -> int:
    try:
        spent, period = quota.read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if spent == "max" else int(spent) // int(period)
