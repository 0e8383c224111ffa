"""`make chaos`: hurt an installation at random moments, and see whether anything is lost or wrong.

    python -m tests.chaos.run [--times 20] [--case kill_worker ...] [--seed 1] [--apis 2] [--workers 2] [--worlds 1]
                              [--model DIRECTORY] [--stall 3] [--write] [--json FILE]

Real processes on this machine, with a fake engine whose answers follow from the stored bytes (or with the torch engine
and a model), and with scaled times. In each round visitors upload documents, ask about them and about older ones, and
delete some, while a fault happens; each answer must be that of a reference which nothing happens to, and each refusal
must say that it is worth trying again. `--write` puts what was seen into docs/faults.md; `--json` into lines of a file,
which `python -m tests.chaos.report` adds to that page elsewhere.
"""

import argparse
import os
import queue
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

from tests.chaos.cases import FAULTS, WORST
from tests.chaos.chaos import Chaos, Tally
from tests.chaos.report import line_of, save, write
from tests.chaos.world import World

VISIT_OF_A_MODEL_S = 20.0
AT_ONCE = 2
"""Rounds of a case before the next one: what is wrong anywhere shows early."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds to be done, and what came of those that were."""

    arguments: argparse.Namespace
    tallies: dict[str, Tally]
    rounds: "queue.SimpleQueue[tuple[str, int]]" = field(default_factory=queue.SimpleQueue)


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _end)
    plan = Plan(arguments, {case: Tally() for case in arguments.case or (WORST if arguments.model else FAULTS)})
    for done in range(0, arguments.times, AT_ONCE):
        for case in plan.tallies:
            plan.rounds.put((case, min(AT_ONCE, arguments.times - done)))
    with ThreadPoolExecutor(arguments.worlds) as pool:
        for world in [pool.submit(_work, n, plan) for n in range(arguments.worlds)]:
            world.result()
    return 1 if any(tally.failure for tally in plan.tallies.values()) else 0


def _end(*_: object) -> None:
    """Told to stop: leave no process behind."""
    for process in reversed(psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="rounds of each case")
    parser.add_argument("--case", action="append", choices=sorted(FAULTS), help="only these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apis", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worlds", type=int, default=1, help="installations side by side, which share the cases")
    parser.add_argument("--model", default="", help="the torch engine with this model, and only the worst cases")
    parser.add_argument("--stall", type=float, default=3.0, help="seconds for which a server stands still")
    parser.add_argument("--write", action="store_true", help="write what was seen to docs/faults.md")
    parser.add_argument("--json", type=Path, help="add what was seen to the lines of this file")
    return parser.parse_args()


def _work(n: int, plan: Plan) -> None:
    """Rounds of cases, one after the other, in one world. After a failure the world is a new one."""
    arguments = plan.arguments
    n_worlds = 0
    while not plan.rounds.empty():
        n_worlds += 1
        with tempfile.TemporaryDirectory(prefix="preread-chaos-") as name:
            sizes: dict[str, Any] = {"n_apis": arguments.apis, "n_workers": arguments.workers}
            with World(Path(name), **sizes, model=arguments.model, stall_s=arguments.stall) as world:
                chaos = Chaos(world, Random(f"{arguments.seed} {n} {n_worlds}"))
                if arguments.model:
                    chaos.visit_s = VISIT_OF_A_MODEL_S
                if not _in_world(chaos, plan):
                    keep_logs(Path(name))


def _in_world(chaos: Chaos, plan: Plan) -> bool:
    """False when something was lost or wrong."""
    while True:
        try:
            case, times = plan.rounds.get_nowait()
        except queue.Empty:
            return True
        tally = plan.tallies[case]
        if tally.failure:
            continue
        latest = _rounds(chaos, case, times)
        with tally.lock:
            tally.add(latest)
            print(line_of(case, tally), flush=True)
            if plan.arguments.write:
                write(case, latest, plan.arguments)
            if plan.arguments.json:
                save(case, latest, plan.arguments)
        if latest.failure:
            return False


def _rounds(chaos: Chaos, case: str, times: int) -> Tally:
    tally, began = Tally(), time.monotonic()
    try:
        for _ in range(times):
            chaos.round(FAULTS[case], tally)
        if FAULTS[case].again or FAULTS[case].destroys:
            chaos.documents.clear()
    except Exception as error:
        tally.failure = str(error) or repr(error)
        if not isinstance(error, AssertionError):
            traceback.print_exc()
    tally.seconds = time.monotonic() - began
    return tally


def keep_logs(directory: Path) -> None:
    """Beside the world's folder, which goes."""
    kept = Path(tempfile.mkdtemp(prefix="preread-chaos-logs-"))
    for log in directory.glob("*.log"):
        (kept / log.name).write_bytes(log.read_bytes())
    print(f"the logs are in {kept}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
