"""What an engine does in its first idle moments: memory for the document that is likely to be asked about."""

import logging
import threading

from cache_store.store import SnapshotStore
from service.engine.protocol import Runner

log = logging.getLogger(__name__)


def prepare_memory(runner: Runner, store: SnapshotStore, max_tokens: int) -> threading.Thread:
    """In a thread: have memory ready for the largest stored document of at most `max_tokens` tokens."""
    thread = threading.Thread(target=_prepare, args=(runner, store, max_tokens), name="prepare", daemon=True)
    thread.start()
    return thread


def _prepare(runner: Runner, store: SnapshotStore, max_tokens: int) -> None:
    if runner.tier != "host":
        return  # documents go into memory that the runner has had since it was loaded: no need to look into the store
    try:
        n_tokens = max((n for n in _document_tokens(store) if n <= max_tokens), default=0)
        if n_tokens:
            runner.prepare_document(n_tokens)
    except Exception:
        # Only speed depends on it.
        log.exception("no memory was prepared for documents")


def _document_tokens(store: SnapshotStore) -> list[int]:
    """Rows that each stored document takes in memory: of a windowed one those that stay resident."""
    published = {e.name.key: e.n_tokens for e in store.entries() if e.state == "published" and e.n_tokens is not None}
    rows = [published.get(key.of_kind("resident"), n) for key, n in published.items() if key.kind == "document"]
    return [n for n in rows if n is not None]
