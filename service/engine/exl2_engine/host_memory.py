"""Host memory for documents that leave the card: pinned, in slabs, allocated ahead and never given back.

Pinning costs about a third of a second a GB, far too much while somebody waits. So a thread pins slab after slab from
the start, up to the budget; until it is done, a document that finds no room goes without a copy.
"""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from service.engine.exl2_engine.copies import host_memory

log = logging.getLogger(__name__)

SLAB_NBYTES = 64 << 20
"""A power of two: torch rounds pinned memory up to one."""
LEFT_FREE = 0.25
"""Share of the machine's free memory that is never pinned: pinned memory cannot be swapped out."""

Extent = tuple[int, int, int]
"""Slab, first row, number of rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a document, in order, wherever they lie."""

    extents: tuple[Extent, ...]
    slabs: tuple[Tensor, ...]

    def parts(self, first: int, n: int) -> Iterator[Tensor]:
        """Rows [first, first + n) as tensors ``[rows, row_nbytes]`` of consecutive memory."""
        for (_, start, held), slab in zip(self.extents, self.slabs, strict=True):
            if n > 0 and first < held:
                here = min(n, held - first)
                yield slab[start + first : start + first + here]
                first, n = 0, n - here
            else:
                first = max(first - held, 0)


class HostMemory:
    """Rows of `row_nbytes` bytes within `budget_nbytes` of host memory. Methods are for any thread."""

    def __init__(
        self, row_nbytes: int, budget_nbytes: int, device: torch.device, *, slab_nbytes: int = SLAB_NBYTES
    ) -> None:
        self.row_nbytes = row_nbytes
        self._slab_nbytes = max(min(slab_nbytes, budget_nbytes), row_nbytes)
        self._rows_per_slab = self._slab_nbytes // row_nbytes
        self._n_wanted = budget_nbytes // self._slab_nbytes
        self._device = device
        self._slabs: list[Tensor] = []
        self._free: list[Extent] = []
        self._lock = threading.Lock()
        self._closing = False
        self._n_used = 0
        self._thread = threading.Thread(target=self._allocate, name="pin-memory", daemon=True)
        self._thread.start()

    @property
    def used_nbytes(self) -> int:
        """Bytes of the rows that are taken."""
        return self._n_used * self.row_nbytes

    @property
    def allocated_nbytes(self) -> int:
        return len(self._slabs) * self._slab_nbytes

    def take(self, n_rows: int) -> Rows | None:
        """`n_rows` rows, in as few pieces as there are; None when fewer are free."""
        with self._lock:
            if sum(n for _, _, n in self._free) < n_rows:
                return None
            self._n_used += n_rows
            taken: list[Extent] = []
            while n_rows:
                slab, first, n = self._free[0]
                here = min(n, n_rows)
                taken.append((slab, first, here))
                self._free[0:1] = [(slab, first + here, n - here)] if here < n else []
                n_rows -= here
            return Rows(tuple(taken), tuple(self._slabs[slab] for slab, _, _ in taken))

    def give_back(self, rows: Rows) -> None:
        """Free rows, once, when no copy uses them any more."""
        with self._lock:
            self._n_used -= sum(n for _, _, n in rows.extents)
            self._free = _merged([*self._free, *rows.extents])

    def wait_allocated(self) -> None:
        """Block until as much as ever will be is allocated."""
        self._thread.join()

    def close(self) -> None:
        """Stop allocating."""
        self._closing = True
        self._thread.join()

    def _allocate(self) -> None:
        room = int(psutil.virtual_memory().available * (1 - LEFT_FREE))
        n_wanted = min(self._n_wanted, room // self._slab_nbytes)
        if n_wanted < self._n_wanted:
            log.warning("only %d MiB of host memory are free for documents", n_wanted * self._slab_nbytes >> 20)
        for _ in range(n_wanted):
            if self._closing:
                return
            try:
                memory = host_memory(self._slab_nbytes, self._device)
            except (RuntimeError, MemoryError) as error:
                log.warning("no more host memory for documents after %d MiB: %s", self.allocated_nbytes >> 20, error)
                return
            self._add(memory)

    def _add(self, memory: Tensor) -> None:
        rows = memory[: self._rows_per_slab * self.row_nbytes].view(self._rows_per_slab, self.row_nbytes)
        with self._lock:
            self._slabs.append(rows)
            self._free = _merged([*self._free, (len(self._slabs) - 1, 0, self._rows_per_slab)])


def _merged(extents: list[Extent]) -> list[Extent]:
    """In order, neighbours joined."""
    merged: list[Extent] = []
    for slab, first, n in sorted(extents):
        if merged and merged[-1][0] == slab and merged[-1][1] + merged[-1][2] == first:
            merged[-1] = (slab, merged[-1][1], merged[-1][2] + n)
        else:
            merged.append((slab, first, n))
    return merged
