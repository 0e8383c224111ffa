"""Summary slots of a windowed document: in memory beside its resident rows, on disk a snapshot beside theirs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.reader import SnapshotReader
from cache_store.rows import take_head_rows
from cache_store.slots import Counts, layer_rows, slot_layout, stored_rows
from cache_store.store import SnapshotStore
from service.engine.host.kept import Subject
from service.engine.host.window import Window
from service.engine.protocol import Runner
from service.engine.scheduler.loop import Scheduler

Places = list[list[npt.NDArray[np.int64]]]
"""The tokens that are slots, by layer and head, ascending in each."""


@dataclass(frozen=True, slots=True)
class SlotRecords:
    """Encoded slots: `counts` of each head, `records` of each layer, as `cache_store.slots` says. `ids`: the tokens
    that they are, in the order of the stored rows."""

    counts: Counts
    records: list[memoryview]
    ids: npt.NDArray[np.integer]

    def places(self, heads: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.int64]]:
        """The tokens that are slots of each of `heads`, pairs of layer and head."""
        sizes = np.array([[stored_rows(n) for n in of_layer] for of_layer in self.counts], np.int64)
        firsts = (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)
        return [np.asarray(self.ids[firsts[i, h] : firsts[i, h] + self.counts[i][h]], np.int64) for i, h in heads]


class SlotGatherer:
    """Takes the slots out of the layers of a cold snapshot, one layer after another."""

    def __init__(self, runner: Runner, places: Places, n_tokens: int) -> None:
        self._layout = runner.layout
        self._places = places
        self._n_tokens = n_tokens
        self._taken: list[memoryview] = []

    def add(self, records: Sequence[memoryview]) -> None:
        """The records of the next layer."""
        own = [
            take_head_rows(records, self._n_tokens, self._layout, head, rows)
            for head, rows in enumerate(self._places[len(self._taken)])
        ]
        self._taken.append(memoryview(bytearray().join(record for of_head in own for record in of_head)))

    @property
    def slots(self) -> SlotRecords:
        counts = [[len(rows) for rows in of_layer] for of_layer in self._places]
        return SlotRecords(counts, self._taken, np.array(_stored_ids(self._places), np.int64))


def write_slots(store: SnapshotStore, runner: Runner, subject: Subject, slots: SlotRecords, places: Places) -> int:
    """Make and publish the snapshot; its tokens are the places of the rows in the document. Its bytes.

    Raises what storing raises.
    """
    layout = slot_layout(runner.layout)
    ids = _stored_ids(places)
    nbytes = layout.record_nbytes(layout.block_tokens)
    with store.begin(
        subject.slots_key, runner.fingerprint, layout, ids, context_digest=subject.digest, slot_counts=slots.counts
    ) as builder:
        for records in slots.records:
            for first in range(0, len(records), nbytes):
                builder.append([records[first : first + nbytes]])
        return builder.publish().nbytes


def open_slots(store: SnapshotStore, runner: Runner, subject: Subject) -> SnapshotReader:
    """The snapshot of the slots of a document that has some. Raises SnapshotMiss, also when there are not as many."""
    layout = runner.layout
    reader = store.open(subject.slots_key, runner.fingerprint, slot_layout(layout), context_digest=subject.digest)
    counts = _counts(reader)
    if [len(n) for n in counts] != [layout.n_kv_heads] * layout.n_layers or sum(
        map(sum, counts)
    ) != subject.n_slot_rows:
        reader.close()
        raise SnapshotMiss(
            MissReason.CHECKSUM, f"there are not {subject.n_slot_rows} slots of {layout.n_layers} layers"
        )
    return reader


def read_slots(reader: SnapshotReader) -> SlotRecords:
    """All of it, verified. Raises SnapshotMiss."""
    counts = _counts(reader)
    row = reader.layout.record_nbytes(1)
    data, at = memoryview(bytearray().join(run[2] for run in reader.layers())), 0
    records: list[memoryview] = []
    for n in layer_rows(counts):
        records.append(data[at : at + n * row])
        at += n * row
    return SlotRecords(counts, records, reader.token_ids)


def load_slots(
    scheduler: Scheduler, runner: Runner, handle: Any, slots: SlotRecords, check: Callable[[], None], ahead: int
) -> None:
    """Into a document of the runner, layer by layer, so that steps go on in between. `check` may raise to give up."""
    scheduler.run(runner.new_slots, handle, slots.counts)
    loads = Window(ahead)
    for layer, records in enumerate(slots.records):
        loads.add(scheduler.call(runner.load_slots, handle, layer, records))
        check()
    loads.finish()


def _counts(reader: SnapshotReader) -> Counts:
    stored = reader.manifest.slots
    return [] if stored is None else stored.counts


def _stored_ids(places: Places) -> list[int]:
    """The token of each stored row."""
    return [place for of_layer in places for rows in of_layer for place in _filled(rows)]


def _filled(rows: npt.NDArray[np.int64]) -> list[int]:
    return [*rows.tolist(), *[int(rows[-1])] * (stored_rows(len(rows)) - len(rows))] if len(rows) else []
