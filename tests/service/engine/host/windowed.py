"""What tests of windowed documents share."""

import threading

import numpy as np

from cache_store.keys import DIRECTORIES, EntryName, SnapshotKey
from cache_store.reader import SnapshotReader
from service.engine.fake_rows import FakeRows
from service.engine.messages import BuildDone, BuildProgress, BuildRequest, Retention

N_TOKENS = 1000
TOKENS = [(i * i + 7 * i) % 251 + 2 for i in range(N_TOKENS)]
RETENTION = Retention(sink_tokens=8, summary_tokens=24, window_tokens=40, segment_tokens=256, fetch_tokens=96)
N_ROWS = 8 + 24 + 40
COLD = SnapshotKey("own", "document", "doc")
RESIDENT = SnapshotKey("own", "resident", "doc")
SLOTS = SnapshotKey("own", "slots", "doc")
MARK = 300
"""A token that stands only where a test puts it."""


def with_mark(at: int) -> list[int]:
    """A document with the mark at one place, so that a question that names it finds its span."""
    return [*TOKENS[:at], MARK, *TOKENS[at + 1 :]]


def built(events) -> BuildDone:
    assert isinstance(events[-1], BuildDone), events[-1]
    return events[-1]


def build_until(lab, reached, end, tokens=TOKENS, retention=RETENTION) -> list:
    """Begin a build, and call `end` once a progress event is as `reached` says; the events of the build."""
    events: list = []
    there, ending = threading.Event(), threading.Event()

    def emit(event) -> None:
        events.append(event)
        if isinstance(event, BuildProgress) and reached(event):
            there.set()
            ending.wait(60)  # it must not get on while the machine does something else

    future = lab.host.build(BuildRequest("b", lab.DOC, list(tokens), retention), emit)
    assert there.wait(60)
    ending.set()
    end()
    future.result(60)
    return events


def opened(lab, key):
    return SnapshotReader(lab.root / "snapshots", EntryName(key, lab.runner.fingerprint.digest))


def rows_of(lab, key, layer: int) -> np.ndarray:
    """All rows of a layer of a snapshot, bytes ``[n_kv_heads, n, width]``."""
    with opened(lab, key) as reader:
        rows = [FakeRows(reader.layout).decode(records, n) for _, _, records, n in reader.read_layer(layer)]
        return np.concatenate(rows, 1)


def files(lab, *kinds):
    """The shards of a document's snapshots; of that of all tokens when no kinds are named."""
    return [shard.read_bytes() for kind in kinds or ("document",) for shard in lab.shards(DIRECTORIES[kind])]


def damage(shard, at=-3):
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)
