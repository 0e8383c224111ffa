"""Chunks of documents waiting to be prefilled or replayed: one of each document in turn."""

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class ChunkCancelled(Exception):
    """The document's build was cancelled; the document is as it was before the chunk."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Long work on a document. `work` gets what it must call between two layers; `done` gives its result. `n_tokens`:
    tokens of the document that it computes for good. `is_draft`: the draft model does."""

    document: Any
    n_tokens: int
    work: Callable[[Callable[[], None]], Any]
    is_cancelled: Callable[[], bool]
    is_draft: bool = False
    done: "Future[Any]" = field(default_factory=Future)


class ChunkQueue:
    """First in, first out within a document; round robin among documents."""

    def __init__(self) -> None:
        self._queues: OrderedDict[int, deque[Chunk]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, chunk: Chunk) -> None:
        self._queues.setdefault(id(chunk.document), deque()).append(chunk)

    def pop(self) -> Chunk:
        """The next chunk; its document goes to the end of the line. Raises KeyError when there is none."""
        key, queue = self._queues.popitem(last=False)
        chunk = queue.popleft()
        if queue:
            self._queues[key] = queue
        return chunk
