"""Opening the snapshots of a document: the one of all its tokens, and the one of what is resident."""

from cache_store.reader import SnapshotReader
from cache_store.store import SnapshotStore
from service.engine.host.kept import Subject
from service.engine.protocol import Runner


def open_full(store: SnapshotStore, runner: Runner, subject: Subject) -> SnapshotReader:
    """The snapshot of all tokens, the cold one of a windowed document. Raises SnapshotMiss."""
    return store.open(
        subject.full_key,
        runner.fingerprint,
        runner.layout,
        token_digest=subject.token_digest,
        segments=subject.segments,
    )


def open_resident(store: SnapshotStore, runner: Runner, subject: Subject) -> SnapshotReader:
    """The snapshot of what is resident; that of all tokens, for a document that is kept whole. Raises SnapshotMiss."""
    if subject.kept is None:
        return open_full(store, runner, subject)
    return store.open(subject.key, runner.fingerprint, runner.layout, context_digest=subject.digest)
