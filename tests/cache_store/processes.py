"""What tests of many processes run in them: ``python -m tests.cache_store.processes <what> <root> ...``."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cache_store.area import DIRECTORIES
from cache_store.errors import BudgetExceeded, BuildLocked, MissReason, SnapshotMiss
from cache_store.keyring import KeyRing
from cache_store.keys import SnapshotKey
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import FINGERPRINT, KEY, RESIDENT, SLOTS, Recipe, StepDisk

DOCUMENT = Recipe(n_tokens=12)
TURN = replace(DOCUMENT, key=SnapshotKey("alice", "turn", "turn-1"))
ROWS = replace(RESIDENT, n_tokens=12)
CHANGED = replace(DOCUMENT, seed=7)
KEYS = KeyRing(bytes(range(32)))


def killed_builds(
    root: Path, recipe: Recipe, prepare: Callable[[SnapshotStore], object], keys: KeyRing | None = None
) -> None:
    """For each step of a build: a fresh store in ``root/<step>`` whose builder died just before it."""
    killed_at_every_step(root, prepare, lambda store: recipe.build(store), keys)


def killed_deletions(root: Path) -> None:
    def prepare(store: SnapshotStore) -> None:
        for recipe in (DOCUMENT, ROWS):
            recipe.build(store)
            store.quarantine(recipe.key, FINGERPRINT.digest, MissReason.CANARY, "x")
            recipe.build(store)

    killed_at_every_step(root, prepare, lambda store: store.delete(KEY))


def killed_quarantines(root: Path) -> None:
    def prepare(store: SnapshotStore) -> None:
        DOCUMENT.build(store)
        store.quarantine(KEY, FINGERPRINT.digest, MissReason.CANARY, "x")
        DOCUMENT.build(store)

    def act(store: SnapshotStore) -> None:
        store.quarantine(KEY, FINGERPRINT.digest, MissReason.CHECKSUM, "y")

    killed_at_every_step(root, prepare, act)


def killed_at_every_step(
    root: Path,
    prepare: Callable[[SnapshotStore], object],
    act: Callable[[SnapshotStore], object],
    keys: KeyRing | None = None,
) -> None:
    for step in range(1000):
        prepare(SnapshotStore(root / f"{step:03d}"))
        pid = os.fork()
        if not pid:
            act(SnapshotStore(root / f"{step:03d}", disk=StepDisk(killer(step)), keys=keys))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    raise AssertionError("a build without an end")


def killer(step: int) -> Callable[[str], None]:
    # Opening a store makes sure of its directories, which is none of the steps meant here.
    left = step + len(DIRECTORIES)

    def on_step(_: str) -> None:
        nonlocal left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    return on_step


def found(store: SnapshotStore) -> bool:
    try:
        DOCUMENT.read(store)
    except SnapshotMiss as miss:
        if miss.reason is not MissReason.ABSENT:
            raise
        return False
    return True


def build_or_wait(root: Path) -> None:
    """Build, or wait for whoever does; says which, and reads the result."""
    store = SnapshotStore(root)
    word = "waited"
    for _ in range(6000):
        if found(store):
            break
        try:
            with DOCUMENT.begin(store) as builder:
                if found(store):  # published by another between the look above and the lock
                    builder.abort()
                    break
                time.sleep(0.2)
                for records in DOCUMENT.blocks[builder.n_blocks_done :]:
                    builder.append(records)
                builder.publish()
            word = "built"
        except BuildLocked:
            time.sleep(0.01)
    assert DOCUMENT.read(store) == DOCUMENT.blocks
    print(word)


def build_within(root: Path, budget_nbytes: int, name: str) -> None:
    """Build a pinned document of its own within a budget; says whether it fitted."""
    store = SnapshotStore(root, budget_nbytes=budget_nbytes)
    recipe = replace(DOCUMENT, key=SnapshotKey("alice", "document", name))
    store.pin(recipe.key, True)
    try:
        recipe.build(store)
        print("fitted")
    except BudgetExceeded as error:
        print("refused" if error.needed_nbytes > error.available_nbytes else "refused for nothing")


def hold(root: Path) -> None:
    """Begin a build, write one block, say so, and wait to be killed."""
    with DOCUMENT.begin(SnapshotStore(root)) as builder:
        builder.append(DOCUMENT.blocks[0])
        print("ready", flush=True)
        time.sleep(60)


def main(what: str, root: Path, *rest: str) -> None:
    if what == "document":
        killed_builds(root, DOCUMENT, lambda store: None)
    elif what == "sealed":
        killed_builds(root, DOCUMENT, lambda store: None, KEYS)
    elif what == "turn":
        killed_builds(root, TURN, lambda store: None)
    elif what == "resident":
        killed_builds(root, ROWS, DOCUMENT.build)
    elif what == "slots":
        killed_builds(root, SLOTS, DOCUMENT.build)
    elif what == "replacement":
        killed_builds(root, CHANGED, DOCUMENT.build)
    elif what == "deletion":
        killed_deletions(root)
    elif what == "quarantine":
        killed_quarantines(root)
    elif what == "build-or-wait":
        build_or_wait(root)
    elif what == "build-within":
        build_within(root, int(rest[0]), rest[1])
    else:
        hold(root)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
