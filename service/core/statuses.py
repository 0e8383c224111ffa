"""The states of a document, in the only order they are passed through."""

QUEUED = "queued"
PARSING = "parsing"
PREFILLING = "prefilling"
COMPACTING = "compacting"
PERSISTING = "persisting"
READY = "ready"
FAILED = "failed"
CANCELLED = "cancelled"

ORDER = (QUEUED, PARSING, PREFILLING, COMPACTING, PERSISTING)
UNFINISHED = frozenset(ORDER)
TERMINAL = frozenset({READY, FAILED, CANCELLED})


def before(status: str) -> frozenset[str]:
    """Statuses from which a document may move to `status`; itself included, for a job taken up again."""
    return frozenset(ORDER[: ORDER.index(status) + 1])
