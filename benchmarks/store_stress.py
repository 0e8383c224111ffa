"""Many processes on one disk tier, some of which are killed every few seconds: ``python -m benchmarks.store_stress``.

Each process puts, gets, evicts and deletes snapshots at random. Watched meanwhile, under the store's own lock: the
bytes on disk never exceed the budget by a shard. They may exceed it by what is not reserved, 1 kB each at most: the
journals of documents, which are not of the account, and manifests of turns, which are counted as they are written.
Every reader compares every byte with what it must be: what it gets is whole, or a miss that says `absent` or
`evicted`. At the end files and account agree, and nothing is left over.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from cache_store.area import Area
from cache_store.budget import COUNTED, Ledger
from cache_store.disk import Disk, names_in, tree_size
from cache_store.errors import BudgetExceeded, BuildLocked, MissReason, SnapshotMiss, StorageFailed
from cache_store.fingerprint import Fingerprint
from cache_store.keys import SnapshotKey
from cache_store.layout import KVLayout, KVType
from cache_store.store import SnapshotStore

LAYOUT = KVLayout(n_layers=2, n_kv_heads=2, head_dim=64, kv_type=KVType.K8V8, block_tokens=64)
FINGERPRINT = Fingerprint("stress", "none", "none", "none", "none", "k8v8", "stress", "none", "64")
KEYS = [SnapshotKey("alice", "document", f"doc-{i}") for i in range(24)]
KEYS += [SnapshotKey("alice", "turn", f"turn-{i}") for i in range(16)]
LONGEST = 400
OPERATIONS = {"put": 40, "get": 45, "evict": 5, "delete": 8, "pin": 2}
ALLOWED = (MissReason.ABSENT, MissReason.EVICTED)
_WATCH_S = 0.02


@dataclass(slots=True)
class Report:
    """`over_nbytes`: the most on disk above the budget. `usage_error_nbytes`: account less files, at the end."""

    cycles: int = 0
    kills: int = 0
    seconds: float = 0.0
    budget_nbytes: int = 0
    most_nbytes: int = 0
    over_nbytes: int = 0
    watched: int = 0
    usage_error_nbytes: int = 0
    left_over: list[str] = field(default_factory=list)
    damaged: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)


def tokens_of(version: int) -> list[int]:
    """The tokens of a version of a snapshot; the first one is the version."""
    rng = np.random.default_rng(version)
    return [version, *rng.integers(0, 1 << 17, int(rng.integers(1, LONGEST))).tolist()]


def blocks_of(version: int, n_tokens: int) -> list[list[bytes]]:
    rng = np.random.default_rng(version + 1)
    lengths = LAYOUT.block_lengths(n_tokens)
    return [[rng.bytes(LAYOUT.record_nbytes(n)) for _ in range(LAYOUT.n_layers)] for n in lengths]


class Worker:
    """One process. A read that gives anything but a whole snapshot ends it with an error."""

    def __init__(self, root: Path, budget_nbytes: int, seed: int) -> None:
        self._store = SnapshotStore(root, budget_nbytes=budget_nbytes)
        self._store.serve(FINGERPRINT)
        self._random = random.Random(seed)

    def run(self) -> None:
        """Until killed; a line for each operation."""
        self._store.sweep()
        while True:
            (name,) = self._random.choices(list(OPERATIONS), OPERATIONS.values())
            outcome = getattr(self, "_" + name)(self._random.choice(KEYS))
            print(f"{name} {outcome}", flush=True)

    def _put(self, key: SnapshotKey) -> str:
        version = self._random.randrange(1 << 16)
        tokens = tokens_of(version)
        try:
            with self._store.begin(key, FINGERPRINT, LAYOUT, tokens) as builder:
                for records in blocks_of(version, len(tokens))[builder.n_blocks_done :]:
                    builder.append(records)
                builder.publish()
        except BuildLocked:
            return "locked"
        except BudgetExceeded:
            return "refused"
        except StorageFailed:
            return "deleted"  # meanwhile
        return "done"

    def _get(self, key: SnapshotKey) -> str:
        try:
            with self._store.open(key, FINGERPRINT, LAYOUT) as reader:
                runs = sorted((layer, first, bytes(records)) for layer, first, records, _ in reader.layers())
                tokens = reader.token_ids.tolist()
        except SnapshotMiss as miss:
            if miss.reason not in ALLOWED:
                raise
            return str(miss.reason)
        blocks = blocks_of(tokens[0], len(tokens))
        whole = [b"".join(block[layer] for block in blocks) for layer in range(LAYOUT.n_layers)]
        found = [b"".join(data for of, _, data in runs if of == layer) for layer in range(LAYOUT.n_layers)]
        assert (tokens, found) == (tokens_of(tokens[0]), whole), "a reader saw something else than what was written"
        return "whole"

    def _evict(self, _: SnapshotKey) -> str:
        return f"{bool(self._store.evict_for(self._random.randrange(1, 200_000)).gone)}"

    def _delete(self, key: SnapshotKey) -> str:
        return f"{bool(self._store.delete(key).objects)}"

    def _pin(self, key: SnapshotKey) -> str:
        pinned = self._random.random() < 0.2
        self._store.pin(key, pinned)
        return f"{pinned}"


class Stress:
    """Starts the processes, kills them, watches the disk."""

    def __init__(self, root: Path, *, processes: int, kill_every_s: float, budget_nbytes: int, seed: int = 0) -> None:
        self._root = root
        self._kill_every_s = kill_every_s
        self._random = random.Random(seed)
        self._seed = seed
        self._logs: list[Path] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._n = processes
        self.report = Report(budget_nbytes=budget_nbytes)
        root.mkdir(parents=True)
        ledger = Ledger(root / "store", budget_nbytes, 0)
        self._area = Area(root / "store", Disk(), ledger)
        self._area.prepare()

    def run(self, cycles: int) -> Report:
        """Raises RuntimeError when a process ended by itself."""
        began = time.monotonic()
        next_kill = began + self._kill_every_s
        try:
            self._processes = [self._started() for _ in range(self._n)]
            while self._cycles() < cycles:
                self._watch()
                if time.monotonic() > next_kill:
                    self._kill_one()
                    next_kill = time.monotonic() + self._kill_every_s * self._random.uniform(0.5, 1.5)
                time.sleep(_WATCH_S)
            self._check_alive()
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
        self.report.seconds = time.monotonic() - began
        self._finish()
        return self.report

    def _started(self) -> subprocess.Popen[bytes]:
        self._seed += 1
        log = self._root / f"log-{self._seed}"
        self._logs.append(log)
        arguments = [str(self._root / "store"), str(self.report.budget_nbytes), str(self._seed)]
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
            command = [sys.executable, "-m", "benchmarks.store_stress", "--worker", *arguments]
            return subprocess.Popen(command, stdout=out, stderr=err, cwd=Path(__file__).parents[1])

    def _cycles(self) -> int:
        return sum(log.read_bytes().count(b"\n") for log in self._logs)

    def _watch(self) -> None:
        with self._area.guard():
            nbytes = sum(tree_size(self._root / "store" / name)[1] for name in COUNTED)
        report = self.report
        report.watched += 1
        report.most_nbytes = max(report.most_nbytes, nbytes)
        report.over_nbytes = max(report.over_nbytes, nbytes - report.budget_nbytes)

    def _kill_one(self) -> None:
        self._check_alive()
        i = self._random.randrange(self._n)
        self._processes[i].send_signal(signal.SIGKILL)
        self._processes[i].wait()
        self._processes[i] = self._started()
        self.report.kills += 1

    def _check_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            said = [text for log in self._logs if (text := log.with_suffix(".err").read_text())]
            raise RuntimeError("a process ended by itself:\n" + "\n".join(said)[-4000:])

    def _finish(self) -> None:
        report, store = self.report, SnapshotStore(self._root / "store", budget_nbytes=self.report.budget_nbytes)
        store.sweep()
        on_disk = sum(tree_size(self._root / "store" / name)[1] for name in ("snapshots", "building", "quarantine"))
        # A build's journal is not of the account.
        on_disk -= sum(path.stat().st_size for path in (self._root / "store" / "building").glob("*.journal"))
        report.usage_error_nbytes = store.usage() - on_disk
        report.damaged = sum(not verdict.ok for verdict in store.verify())
        report.damaged += len(names_in(self._root / "store" / "quarantine"))
        report.left_over = [
            f"{name}/{left}" for name in ("trash", "locks") for left in names_in(self._area.root / name)
        ]
        lines = [line for log in self._logs for line in log.read_text().splitlines()]
        report.cycles = len(lines)
        report.outcomes = dict(sorted(Counter(lines).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--kill-every-s", type=float, default=3.0)
    parser.add_argument("--budget", type=int, default=2_500_000)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        root, budget, seed = arguments.worker
        Worker(Path(root), int(budget), int(seed)).run()
    with tempfile.TemporaryDirectory() as directory:
        stress = Stress(
            Path(directory) / "stress",
            processes=arguments.processes,
            kill_every_s=arguments.kill_every_s,
            budget_nbytes=arguments.budget,
        )
        print(json.dumps(asdict(stress.run(arguments.cycles)), indent=2))


if __name__ == "__main__":
    main()
