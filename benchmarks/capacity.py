"""How many workers, how much memory and disk, how long until the first token: the capacity model.

    python -m benchmarks.capacity                    tables from one machine to a thousand workers
    python -m benchmarks.capacity --page             the same into docs/capacity.md
    python -m benchmarks.capacity --documents 5000 --users 300 --machine h200      one case, with your figures
    python -m benchmarks.capacity --simulate         the closed forms beside a simulation of the product's routing
    python -m benchmarks.capacity --check [--page]   both beside real runs of one, two and three workers

`--check` starts Redis, PostgreSQL, an S3 server, an API process and workers with a fake engine of a slow pace. It
measures with one worker and one user what the model has to be told, then asks at several loads, and ends with status 1
when what was measured is more than a quarter off. It needs a machine that does nothing else.
"""

import argparse
import sys
from dataclasses import replace

from benchmarks.bench_report import machine, table
from benchmarks.capacity_parts import page
from benchmarks.capacity_parts.compare import HEADER, calibration_table, rows
from benchmarks.capacity_parts.profiles import CARD_16, CPU, H200
from benchmarks.capacity_parts.scenarios import SCENARIOS, Scenario, sized
from benchmarks.capacity_parts.shared import Costs

MACHINES = {"cpu": CPU, "card16": CARD_16, "h200": H200}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write what is found into docs/capacity.md")
    parser.add_argument("--check", action="store_true", help="compare with real runs: about six minutes")
    parser.add_argument("--workers", type=int, default=3, help="of the largest real run")
    parser.add_argument("--simulate", action="store_true", help="compare the closed forms with the simulator")
    parser.add_argument("--machine", choices=MACHINES, default="h200")
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=0, help="of each document; else a mixture of lengths")
    parser.add_argument("--redis-gb", type=float, default=0.0, help="memory of the Redis tier")
    parser.add_argument("--no-object", action="store_true", help="there is no object store")
    return parser


def run_check(most_workers: int, *, to_page: bool) -> int:
    """The exit status."""
    from benchmarks.capacity_parts.calibrate import Calibration
    from benchmarks.capacity_parts.check import Run, check

    calibration, runs, shown = "", list[Run](), list[tuple[object, ...]]()
    for one in check(most_workers):
        if isinstance(one, Calibration):
            calibration = calibration_table(one)
            print(f"{machine()}.\n\n{calibration}\n", flush=True)
            continue
        runs.append(one)
        shown += (found := rows(one.workers, one.load, one.found))
        print(f"{table(HEADER, found)}\n{one.n_asked} questions, {one.n_tokens} tokens, {one.spent}\n", flush=True)
    if to_page:
        page.write_check(calibration, shown, runs)
    return int(not all(run.met for run in runs))


def run_one(chosen: argparse.Namespace) -> str:
    scenario = Scenario(
        MACHINES[chosen.machine],
        chosen.documents,
        chosen.users,
        redis_nbytes=chosen.redis_gb * 1e9,
        has_object=not chosen.no_object,
    )
    if chosen.tokens:
        scenario = replace(scenario, lengths=((1.0, chosen.tokens),))
    return page.tables([sized(scenario, Costs())])


def main() -> int:
    chosen = options().parse_args()
    if chosen.check:
        return run_check(chosen.workers, to_page=chosen.page)
    if chosen.simulate:
        from benchmarks.capacity_parts.simulated import simulated

        found = simulated()
        print(found)
        if chosen.page:
            page.write_simulated(found)
        return 0
    if chosen.documents:
        print(run_one(chosen))
        return 0
    of = [sized(scenario, Costs()) for scenario in SCENARIOS]
    print(page.tables(of))
    if chosen.page:
        page.write_tables(of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
