"""`make chaos`: hurt an installation at random moments, and see whether anything is lost or wrong.

    python -m tests.chaos.run [--times 20] [--case kill_worker ...] [--seed 1] [--apis 2] [--workers 2]

Real processes on this machine, with a fake engine whose answers follow from the stored bytes, and with scaled times.
In each round visitors upload documents, ask about them and about older ones while a fault happens; each answer must be
that of a reference which nothing happens to, and each refusal must say that it is worth trying again.
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.visitor import Known, Visitor
from tests.chaos.world import World

MOST_VISIT_S = 6.0
"""A visit that had to wait for a fault to end says nothing about how long one takes."""


@dataclass(slots=True)
class Chaos:
    """Rounds in one world, whose documents stay."""

    world: World
    random: Random
    n_visitors: int = 2
    documents: list[Known] = field(default_factory=list)
    visit_s: float = 3.0
    """How long a visit took lately: a fault happens at a random moment of it."""

    def round(self, fault: Fault) -> int:
        """How often visitors were told to ask again. Raises Violation."""
        visitors = [Visitor(self.world, self.random.getrandbits(32)) for _ in range(self.n_visitors)]
        fresh = [visitor.new() for visitor in visitors]
        older = [self.random.choice(self.documents) if self.documents else None for _ in visitors]
        with ThreadPoolExecutor(self.n_visitors) as pool:
            began = time.monotonic()
            visits = [pool.submit(_visit, *one) for one in zip(visitors, fresh, older, strict=True)]
            time.sleep(self.random.uniform(0, self.visit_s))
            fault(self.world, self.random)
            self.documents += [visit.result() for visit in visits]
            self.visit_s = min(time.monotonic() - began, MOST_VISIT_S)
        self.world.until_whole()
        return sum(visitor.n_told for visitor in visitors)

    def ask_again(self, most: int = 20) -> None:
        """Everything that was read is still there, and answers. Raises Violation."""
        visitor = Visitor(self.world, self.random.getrandbits(32))
        for known in self.random.sample(self.documents, min(most, len(self.documents))):
            visitor.ask(known)


def _visit(visitor: Visitor, fresh: Known, older: Known | None) -> Known:
    read = visitor.read(fresh)
    visitor.ask(read)
    if older is not None:
        visitor.ask(older)
    return read


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="rounds of each case")
    parser.add_argument("--case", action="append", choices=sorted(FAULTS), help="only these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apis", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="preread-chaos-") as name:
        with World(Path(name), n_apis=arguments.apis, n_workers=arguments.workers) as world:
            chaos = Chaos(world, Random(arguments.seed))
            for case in arguments.case or FAULTS:
                failed += not _case(chaos, case, arguments.times)
    return 1 if failed else 0


def _case(chaos: Chaos, case: str, times: int) -> bool:
    began, n_told = time.monotonic(), 0
    for n in range(times):
        try:
            n_told += chaos.round(FAULTS[case])
            chaos.ask_again(2)
        except AssertionError as error:
            print(f"{case}: round {n + 1} of {times} FAILED: {error}", flush=True)
            return False
    seconds = time.monotonic() - began
    print(
        f"{case}: {times} rounds, nothing lost or wrong; told to ask again {n_told} times; {seconds:.0f} s", flush=True
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
