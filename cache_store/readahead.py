"""Reading ahead of the caller: several threads read and verify, pieces come out in the order of their spans."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import numpy as np

from cache_store.pieces import Buffers, Piece, Run, Span

Read = Callable[[Span, memoryview], list[Run]]
"""Fills memory from a span and gives its verified runs; raises OSError or SnapshotMiss."""

_KEPT = 6
_READERS = 8
_TOGETHER_NBYTES = 1 << 20


def read_inline(spans: Sequence[Span], read: Read, buffers: Buffers) -> Generator[Piece]:
    """Piece after piece in the caller's own thread. Raises what `read` raises."""
    for span in spans:
        memory = buffers.take(span.nbytes, wait=True)
        assert memory is not None
        yield _piece(span, memory, read, buffers)


def read_ahead(spans: Sequence[Span], read: Read, buffers: Buffers) -> Generator[Piece]:
    """Pieces read by `buffers.n_readers` threads, in the order of `spans`. Raises what `read` raises.

    Memory is taken here, in that order, and waited for only while no piece is on its way: so neither the pieces of one
    reader nor those of several that share the buffers can wait for each other in a circle.
    """
    waiting: deque[tuple[Future[Piece], memoryview]] = deque()
    with ThreadPoolExecutor(buffers.n_readers, "snapshot-read") as pool:
        try:
            for span in spans:
                while (memory := buffers.take(span.nbytes, wait=not waiting)) is None:
                    yield _next(waiting)
                waiting.append((pool.submit(_piece, span, memory, read, buffers), memory))
                if len(waiting) > 2 * buffers.n_readers + 1:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        finally:
            for future, memory in waiting:
                _abandon(future, memory, buffers)


def read_together(spans: Sequence[Span], read: Read) -> list[Run]:
    """All runs at once, read by several threads into one new piece of memory. Raises what `read` raises."""
    memory = np.empty(sum(span.nbytes for span in spans), np.uint8).data
    ends = list(accumulate(span.nbytes for span in spans))
    parts = [memory[end - span.nbytes : end] for span, end in zip(spans, ends, strict=True)]
    if len(memory) <= _TOGETHER_NBYTES:
        return [run for span, part in zip(spans, parts, strict=True) for run in read(span, part)]
    with ThreadPoolExecutor(_READERS, "snapshot-read") as pool:
        return [run for runs in pool.map(read, spans, parts) for run in runs]


def _next(waiting: "deque[tuple[Future[Piece], memoryview]]") -> Piece:
    return waiting.popleft()[0].result()


def _abandon(future: "Future[Piece]", memory: memoryview, buffers: Buffers) -> None:
    """Nobody takes this piece any more; its memory comes back, at once when it was not begun."""
    if future.cancel():
        buffers.give_back(memory)
    else:
        future.add_done_callback(_release)


def _piece(span: Span, memory: memoryview, read: Read, buffers: Buffers) -> Piece:
    try:
        return Piece(read(span, memory), memory, buffers)
    except BaseException:
        buffers.give_back(memory)
        raise


def _release(future: "Future[Piece]") -> None:
    if future.exception() is None:
        future.result().release()


class HeapBuffers:
    """Ordinary memory, used again once nobody looks at it: new pages cost more than reading into them.

    The memory of a run is its holder's for as long as a reference to it is left; giving it back is not needed.
    """

    piece_nbytes = 4 << 20
    n_readers = 1

    def __init__(self) -> None:
        self._pool: list[bytearray] = []

    def take(self, nbytes: int, *, wait: bool) -> memoryview:
        for buffer in self._pool:
            if len(buffer) >= nbytes and _is_idle(buffer):
                return memoryview(buffer)[:nbytes]
        buffer = bytearray(nbytes)
        if len(self._pool) < _KEPT:
            self._pool.append(buffer)
        return memoryview(buffer)

    def give_back(self, memory: memoryview) -> None:
        pass


def _is_idle(buffer: bytearray) -> bool:
    """Whether no view of `buffer` is left: Python refuses to resize a bytearray that has one."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True
