"""Copies between host and card beside the computing: a stream of their own, and memory the card can read by itself.

Without a card everything is a plain copy that is over when the call returns, so that the code around it is the same.
"""

import os
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor


class CopyStream:
    """Copies in the order in which they are begun. All methods are for the thread that computes, unless they say
    otherwise."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def queued(self) -> AbstractContextManager[object]:
        """Copies begun inside go to this stream; use `non_blocking`."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def after_compute(self) -> None:
        """Copies begun from now on wait for the computing begun so far, which may read what they overwrite."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def before_compute(self) -> None:
        """Computing begun from now on waits for the copies begun so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def mark(self) -> "Mark":
        """A point behind every copy begun so far. From any thread."""
        return Mark(self._stream)


class Mark:
    """A point in a stream, for any thread."""

    __slots__ = ("_event",)

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self._event = None
        if stream is not None:
            # Blocking: whoever waits gives the processor away instead of asking all the time.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(stream)

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block until every copy before it is over."""
        if self._event is not None:
            self._event.synchronize()


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """Uninitialized host memory, uint8; pinned when the device is a card. Raises RuntimeError when there is none."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def n_readers() -> int:
    """Threads that read and verify: beyond 16 a machine's memory, not its cores, sets the pace."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(16, available or 1))


class HostRing:
    """Slots of host memory to read a snapshot into; `cache_store.pieces.Buffers`.

    A slot that is given back is handed out again once the copies begun from it are over. Methods are for any thread.
    """

    def __init__(self, copies: CopyStream, slot_nbytes: int, n_slots: int) -> None:
        """Raises RuntimeError when there is no memory for it."""
        self.piece_nbytes = slot_nbytes
        self.n_readers = n_readers()
        self._copies = copies
        self._memory = host_memory(slot_nbytes * n_slots, copies.device)
        self._view = self._memory.numpy().data
        self._free = deque(range(n_slots))
        self._leaving: deque[tuple[Mark, int]] = deque()
        self._changed = threading.Condition()
        self.n_slots = n_slots

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def n_free(self) -> int:
        """Slots that nobody holds and no copy reads."""
        with self._changed:
            self._collect()
            return len(self._free)

    def take(self, nbytes: int, *, wait: bool) -> memoryview | None:
        """Raises ValueError for more than a slot."""
        if nbytes > self.piece_nbytes:
            raise ValueError(f"{nbytes} bytes do not fit a slot of {self.piece_nbytes}")
        while True:
            with self._changed:
                self._collect()
                if self._free:
                    at = self._free.popleft() * self.piece_nbytes
                    return self._view[at : at + nbytes]
                if not wait:
                    return None
                if not self._leaving:
                    self._changed.wait()
                    continue
                oldest = self._leaving[0][0]
            oldest.wait()

    def give_back(self, memory: memoryview) -> None:
        """After every copy from it was begun, on `copies`."""
        slot = (np.frombuffer(memory, np.uint8).ctypes.data - self._memory.data_ptr()) // self.piece_nbytes
        mark = self._copies.mark()
        with self._changed:
            self._leaving.append((mark, slot))
            self._changed.notify()

    def _collect(self) -> None:
        while self._leaving and self._leaving[0][0].passed():
            self._free.append(self._leaving.popleft()[1])
