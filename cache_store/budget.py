"""One number for the store's bytes on disk, kept for all processes, and the refusals that follow from it.

The number counts snapshots, builds (at the full length of their files: it is reserved when they begin)
and quarantined copies; not counted are journals and notes, a few hundred bytes each block. Every method
must be called under the store's lock, except where it says otherwise.
"""

import os
from collections.abc import Callable
from pathlib import Path

from cache_store.disk import names_in, tree_size
from cache_store.errors import BudgetExceeded

COUNTED = ("snapshots", "building", "quarantine", "trash")


def free_nbytes(path: Path) -> int:
    """Bytes this user may still write on the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class Ledger:
    """The accounting of a store directory. `budget_nbytes` None means no limit but the free-space floor."""

    def __init__(
        self,
        root: Path,
        budget_nbytes: int | None,
        free_floor_nbytes: int,
        free: Callable[[Path], int] = free_nbytes,
    ) -> None:
        self.budget_nbytes = budget_nbytes
        self._free_floor_nbytes = free_floor_nbytes
        self._root = root
        self._path = root / "usage"
        self._free = free

    def used(self) -> int:
        """Bytes counted; counted anew when the number is missing or damaged. Needs no lock."""
        try:
            return int(self._path.read_text())
        except (OSError, ValueError):
            return self._measured()

    def recount(self) -> int:
        """Set the number to what is on disk."""
        self._store(self._measured())
        return self.used()

    def add(self, delta_nbytes: int) -> None:
        self._store(max(0, self.used() + delta_nbytes))

    def is_too_large(self, needed_nbytes: int) -> bool:
        """Whether `needed_nbytes` would not fit an empty store. Needs no lock."""
        return self.budget_nbytes is not None and needed_nbytes > self.budget_nbytes

    def shortfall(self, needed_nbytes: int) -> int:
        """Bytes to free before `needed_nbytes` more fit; 0 when they do. Raises BudgetExceeded when they are
        more than the whole budget."""
        if self.budget_nbytes is not None and self.is_too_large(needed_nbytes):
            detail = f"a snapshot of {needed_nbytes} bytes is larger than the whole budget of {self.budget_nbytes}"
            raise BudgetExceeded(needed_nbytes, self.budget_nbytes, detail)
        return max(0, needed_nbytes - self.available())

    def available(self) -> int:
        """Bytes that may be written now, by the budget and by the free-space floor. Needs no lock."""
        room = self._free(self._root) - self._free_floor_nbytes
        if self.budget_nbytes is not None:
            room = min(room, self.budget_nbytes - self.used())
        return max(0, room)

    def refuse(self, needed_nbytes: int) -> BudgetExceeded:
        """The error that says why `needed_nbytes` do not fit."""
        available = self.available()
        budget = "no budget" if self.budget_nbytes is None else f"a budget of {self.budget_nbytes}"
        detail = (
            f"{needed_nbytes} bytes are needed, {available} are available: {self.used()} in use of {budget}, "
            f"{self._free(self._root)} free on disk, of which {self._free_floor_nbytes} stay free"
        )
        return BudgetExceeded(needed_nbytes, available, detail)

    def _measured(self) -> int:
        return sum(
            tree_size(self._root / name / child)[1]
            for name in COUNTED
            for child in names_in(self._root / name)
            if "." not in child
        )

    def _store(self, nbytes: int) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # One fixed-width write: a reader without the lock never sees half of a number.
            os.pwrite(fd, b"%020d" % nbytes, 0)
            os.ftruncate(fd, 20)
        finally:
            os.close(fd)
