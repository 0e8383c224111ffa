"""Runs the benchmarks of a card, each in a process of its own and within its share of the time.

    python -m benchmarks.gpu_all --parts ceilings,decode,parity --limit-s 540 [--out DIR] [--dry]

A part that fails or hangs does not stop the others. The last lines are a short table: what ran, what missed a target.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PARTS = {
    "ceilings": ("benchmarks.gpu_ceilings", 15.0),
    "memory": ("benchmarks.gpu_memory", 80.0),
    "decode": ("benchmarks.gpu_decode", 160.0),
    "speculation": ("benchmarks.gpu_speculation", 150.0),
    "draft": ("benchmarks.gpu_draft", 150.0),
    "prefill": ("benchmarks.gpu_prefill", 140.0),
    "restore": ("benchmarks.gpu_restore", 90.0),
    "resume": ("benchmarks.gpu_resume", 250.0),
    "service": ("benchmarks.gpu_service", 80.0),
    "windowed": ("benchmarks.gpu_windowed", 150.0),
    "failures": ("benchmarks.gpu_failures", 100.0),
    "parity": ("benchmarks.gpu_parity", 260.0),
    "convert": ("benchmarks.gpu_convert", 520.0),
}
"""Part -> its module, and the seconds it should get; all scaled to what there is."""
GRACE_S = 15.0
"""A part ends by itself at its limit; this much later it is ended."""


def run_part(part: str, limit_s: float, arguments: argparse.Namespace) -> tuple[str, float]:
    """How a part ended, and its seconds. Its process group is ended with it."""
    command = [sys.executable, "-m", PARTS[part][0], "--out", arguments.out, "--limit-s", f"{limit_s:.0f}"]
    command += ["--dry"] if arguments.dry else []
    started = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit_s + GRACE_S)
        how = "ok" if status == 0 else f"exit {status}"
    except subprocess.TimeoutExpired:
        how = "timed out"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return how, time.monotonic() - started


def outcome(part: str, out: Path) -> tuple[int, int, list[str]]:
    """Rows of a part's result, targets met, and those missed in words."""
    try:
        rows = json.loads((out / f"{part}.json").read_text())["rows"]
    except (OSError, ValueError):
        return 0, 0, []
    missed = [f"{row['what']}: {row['figure']} (target {row['target']})" for row in rows if row["met"] is False]
    return len(rows), sum(row["met"] is True for row in rows), missed


def share(part: str, later: Sequence[str], left_s: float) -> float:
    """The seconds a part may take: what is left, in proportion to what it and those after it should get."""
    wanted = sum(PARTS[p][1] for p in (part, *later))
    return max((left_s - GRACE_S) * PARTS[part][1] / wanted, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, in this order")
    parser.add_argument("--limit-s", type=float, default=570.0, help="for all of them together")
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-results"))
    parser.add_argument("--dry", action="store_true", help="tiny models, on any device")
    arguments = parser.parse_args()
    parts = [part for part in arguments.parts.split(",") if part]
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    until = time.monotonic() + arguments.limit_s
    lines, missed = [], []
    for i, part in enumerate(parts):
        how, seconds = run_part(part, share(part, parts[i + 1 :], until - time.monotonic()), arguments)
        n_rows, n_met, wrong = outcome(part, Path(arguments.out))
        lines.append(f"{part:<10} {how:<10} {seconds:6.1f} s {n_rows:3} rows, {n_met} targets met, {len(wrong)} missed")
        missed += [f"  {part}: {line}" for line in wrong]
    print("\n".join(["", "== summary", *lines, *missed]))


if __name__ == "__main__":
    main()
