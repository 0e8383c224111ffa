"""Names of keys in Redis, and how long things are kept there. All are `bytes`, as Redis gives them back."""

from service.engine.messages import DocumentRef

PREFIX = b"preread:fleet:"
WORKERS = PREFIX + b"workers"
"""The ids of all workers, those that are gone included until somebody notices."""
INFO = PREFIX + b"info"
"""What the workers were, when there were some: an API process can start before the first of them."""
DELETED = PREFIX + b"deleted"
"""A stream of what was deleted, for workers that were away."""
MAX_DELETED = 100_000
PINNED = PREFIX + b"pinned"
"""A set of `member`s, the documents that no disk evicts, and of PINS_KNOWN: without that Redis has forgotten them."""
PINS_KNOWN = b""

BEATS = 3
"""Heartbeats that may be missed."""
KEPT_S = 600
"""How long the events of an ended request are kept."""
RUNNING_S = 3600
"""How long the events of a running request are kept after the latest one."""
SESSION_S = 24 * 3600
HOME_S = 30 * 24 * 3600
MAX_EVENTS = 65_536
"""Batches of events of one request; a longer one loses its beginning, and cannot be taken over."""


def worker(worker_id: str) -> bytes:
    """A hash: `epoch`, and `state`, a `records.WorkerState`. It runs out with the worker's heartbeat."""
    return PREFIX + b"worker:" + worker_id.encode()


def work(worker_id: str, epoch: str) -> bytes:
    """The stream of requests to a worker. It is there as long as the worker is."""
    return PREFIX + b"work:" + worker_id.encode() + b":" + epoch.encode()


def events(run: str) -> bytes:
    """The stream of a run's events, in batches."""
    return PREFIX + b"events:" + run.encode()


def request(request_id: str) -> bytes:
    """A hash: `run`, `worker` and `epoch` of the latest run of a request."""
    return PREFIX + b"request:" + request_id.encode()


def session(session_id: str) -> bytes:
    """The id of the worker that answered a session's last question."""
    return PREFIX + b"session:" + session_id.encode()


def home(document: DocumentRef) -> bytes:
    """A sorted set: ids of the workers on whose disk a document is, or is being made; by time."""
    return PREFIX + b"home:" + member(document)


def member(document: DocumentRef) -> bytes:
    return f"{document.owner_id}/{document.document_id}".encode()


def wake(client_id: str) -> bytes:
    """A stream of one entry: the client's own way to interrupt its blocking read."""
    return PREFIX + b"wake:" + client_id.encode()
