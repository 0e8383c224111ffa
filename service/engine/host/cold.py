"""Windowed documents as far as they are not resident: readers of their cold snapshots, and their indexes in memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cache_store.errors import SnapshotMiss
from cache_store.layout import KVLayout
from cache_store.reader import SnapshotReader
from cache_store.rows import Source, join_rows
from service.engine.drafts.lookup import DocumentLookup
from service.engine.fetch.index import KeyIndex
from service.engine.host.kept import Subject
from service.engine.messages import DocumentRef

Place = Callable[[KeyIndex], None]
Open = Callable[[Subject], SnapshotReader]
FindStarts = Callable[[npt.NDArray[np.integer]], npt.NDArray[np.int64]]
"""Which of a document's tokens begin a sentence; none where that is not known."""
LookUp = Callable[[npt.NDArray[np.integer]], DocumentLookup | None]


@dataclass(slots=True, eq=False)
class ColdDocument:
    """A reader, and the index made from it; None without index heads. `lock` is held while they are made.

    `starts`: the tokens that begin a sentence; `lookup`: where its tokens are found again. `placed`: the index has its
    share of the device's memory. `n_inside`: users that may be scoring, under whom the index does not move.
    """

    subject: Subject
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: SnapshotReader | None = None
    index: KeyIndex | None = None
    lookup: DocumentLookup | None = None
    starts: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    n_users: int = 0
    n_inside: int = 0
    placed: bool = False
    dropped: bool = False

    @property
    def nbytes(self) -> int:
        return self.index.nbytes if self.index is not None else 0

    @property
    def lookup_nbytes(self) -> int:
        return self.lookup.nbytes if self.lookup is not None else 0

    def tokens_of(self, ranges: Sequence[tuple[int, int]]) -> "ColdTokens":
        """The tokens of ranges ``[first, last)``, to be gathered."""
        return ColdTokens(self, np.concatenate([np.arange(first, last) for first, last in ranges]))

    def sources(self, tokens: npt.NDArray[np.int64]) -> list[Source]:
        """For each layer where the rows of some tokens are, read and verified. Raises DocumentMiss for damage."""
        assert self.reader is not None
        layout, n_tokens = self.reader.layout, self.reader.n_tokens
        size = layout.block_tokens
        blocks, places = np.unique(tokens // size, return_inverse=True)
        with self.naming():
            records = self.reader.read_blocks(blocks.tolist())
        n_read = sum(min(size, n_tokens - block * size) for block in blocks.tolist())
        rows = places * size + tokens % size
        return [Source(list(of_layer), n_read, rows) for of_layer in zip(*records, strict=True)]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A miss in the block is one of this document."""
        try:
            yield
        except DocumentMiss:
            raise
        except SnapshotMiss as miss:
            raise DocumentMiss(self.subject.ref, miss) from None


class DocumentMiss(SnapshotMiss):
    """A miss of the snapshot of all tokens of one document."""

    def __init__(self, ref: DocumentRef, miss: SnapshotMiss) -> None:
        super().__init__(miss.reason, miss.detail)
        self.ref = ref


@dataclass(frozen=True, slots=True)
class ColdTokens:
    """Some tokens of a document that is held."""

    cold: ColdDocument
    tokens: npt.NDArray[np.int64]


def gather(parts: Sequence[ColdTokens], layout: KVLayout) -> list[list[memoryview]]:
    """The rows of tokens of several documents behind each other, as blocks ``[i][layer]`` of one run. Raises
    DocumentMiss for damage."""
    by_layer = zip(*(part.cold.sources(part.tokens) for part in parts), strict=True)
    joined = [join_rows(sources, layout) for sources in by_layer]
    return [list(block) for block in zip(*joined, strict=True)]


class ColdDocuments:
    """Cold documents that are asked about, each shared by all its users. Those that nobody uses go, least recently used
    first, when the indexes take more than `budget_nbytes` together. Any thread.

    `open_full` opens a cold snapshot; `heads` are the index heads, pairs of layer and KV head. `place` takes an index
    to a device that has as many bytes for them, if scores are computed there; what does not fit stays where it is.
    `look_up` makes what finds tokens again.
    """

    def __init__(
        self,
        open_full: Open,
        heads: Sequence[tuple[int, int]],
        budget_nbytes: int,
        find_starts: FindStarts,
        place: Place | None = None,
        look_up: LookUp = lambda _: None,
    ) -> None:
        self._open = open_full
        self._find_starts = find_starts
        self._budget = budget_nbytes
        self._place = place
        self._look_up = look_up
        self._placed_nbytes = 0
        self._lock = threading.Lock()
        self._documents: OrderedDict[DocumentRef, ColdDocument] = OrderedDict()
        self.heads = tuple(heads)

    @property
    def n_documents(self) -> int:
        return len(self._documents)

    @property
    def nbytes(self) -> int:
        """Bytes of the indexes in memory."""
        with self._lock:
            return sum(document.nbytes for document in self._documents.values())

    @property
    def lookup_nbytes(self) -> int:
        """Bytes of memory in which documents' tokens are found again."""
        with self._lock:
            return sum(document.lookup_nbytes for document in self._documents.values())

    @contextmanager
    def held(self, subject: Subject) -> Iterator[ColdDocument]:
        """The document, its index in memory, until the block ends. Raises DocumentMiss when its cold snapshot is not
        there; a miss in the block, unless it is another document's, makes the next user open it anew."""
        document, is_inside = self._enter(subject), False
        try:
            with document.lock:
                if document.reader is None:
                    self._load(document)
                self._make_room()
                self._place_index(document)
                with self._lock:
                    document.n_inside, is_inside = document.n_inside + 1, True
            yield document
        except BaseException as error:
            elsewhere = isinstance(error, DocumentMiss) and error.ref != subject.ref
            if document.reader is None or (isinstance(error, SnapshotMiss) and not elsewhere):
                with self._lock:
                    self._drop(document)
            raise
        finally:
            self._leave(document, is_inside=is_inside)

    def drop(self, ref: DocumentRef) -> int:
        """Forget a document; whoever uses it may finish. The bytes that its index takes."""
        with self._lock:
            document = self._documents.get(ref)
            if document is None:
                return 0
            nbytes = document.nbytes
            self._drop(document)
            return nbytes

    def close(self) -> None:
        with self._lock:
            for document in list(self._documents.values()):
                self._drop(document)

    def _enter(self, subject: Subject) -> ColdDocument:
        with self._lock:
            document = self._documents.get(subject.ref)
            if document is not None and not _same(document.subject, subject):
                self._drop(document)
                document = None
            if document is None:
                document = self._documents[subject.ref] = ColdDocument(subject)
            self._documents.move_to_end(subject.ref)
            document.n_users += 1
            return document

    def _load(self, document: ColdDocument) -> None:
        with document.naming():
            self._read(document)

    def _read(self, document: ColdDocument) -> None:
        reader = self._open(document.subject)
        try:
            if self.heads:
                index = KeyIndex(reader.layout, reader.n_tokens, self.heads)
                for layer in index.layers:
                    for _, first, records, n_tokens in reader.read_layer(layer):
                        index.add(layer, first, records, n_tokens)
                document.index, document.starts = index, self._find_starts(reader.token_ids)
            document.lookup = self._look_up(reader.token_ids)
        except BaseException:
            reader.close()
            raise
        document.reader = reader

    def _make_room(self) -> None:
        with self._lock:
            total = sum(document.nbytes + document.lookup_nbytes for document in self._documents.values())
            for document in list(self._documents.values()):
                if total <= self._budget:
                    return
                if not document.n_users:
                    total -= document.nbytes + document.lookup_nbytes
                    self._drop(document)

    def _place_index(self, document: ColdDocument) -> None:
        """To the device, unless others score with it now, or the indexes that are there leave no room, of dropped
        documents too."""
        if self._place is None or document.index is None or document.placed:
            return
        with self._lock:
            if document.n_inside or self._placed_nbytes + document.nbytes > self._budget:
                return
            document.placed = True
            self._placed_nbytes += document.nbytes
        self._place(document.index)

    def _leave(self, document: ColdDocument, *, is_inside: bool) -> None:
        with self._lock:
            document.n_users -= 1
            document.n_inside -= is_inside
            if document.dropped and not document.n_users:
                self._close(document)

    def _drop(self, document: ColdDocument) -> None:
        if not document.dropped:
            document.dropped = True
            del self._documents[document.subject.ref]
            if not document.n_users:
                self._close(document)

    def _close(self, document: ColdDocument) -> None:
        if document.placed:
            self._placed_nbytes -= document.nbytes
        document.index = document.lookup = None
        if document.reader is not None:
            document.reader.close()


def _same(one: Subject, other: Subject) -> bool:
    """Whether the cold snapshots are the same; what is resident may differ."""
    return (one.token_digest, one.segments) == (other.token_digest, other.segments)
