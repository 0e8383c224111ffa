"""One build of a snapshot through an engine that may be lost on the way."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from service.engine.messages import BuildDone, BuildProgress, BuildRequest, DocumentRef, Failed, Retention
from service.engine.protocol import EngineClient
from service.errors import NotFound, ServiceError, StorageFull, TooLong, Unavailable

MAX_LOSSES = 5
"""An engine lost this often at the same place is not tried again: the document may be what kills it."""
FIRST_PAUSE_S = 0.2
"""After a loss; five times as long after each further one at the same place. Workers are lost too when Redis is away,
which must not be taken for what a document does: that is lost five times in half a minute."""
_POLL_S = 0.2
_BUSY_S = 1.0
_RETRIED = frozenset({"engine_lost", "busy"})
_log = structlog.get_logger("preread.builds")


async def build_snapshot(
    engine: EngineClient,
    document: DocumentRef,
    token_ids: list[int],
    retention: Retention | None = None,
    on_progress: Callable[[BuildProgress], None] = lambda _: None,
) -> BuildDone:
    """The finished build. Waits for an engine that is down, and goes on from the journal when it is back.

    Raises StorageFull, TooLong, NotFound (the document was deleted meanwhile) or Unavailable. Cancelling the
    task cancels the build in the engine.
    """
    attempt = _Attempt(engine, document, token_ids, retention, on_progress)
    losses, furthest = 0, 0
    while True:
        await _until_alive(engine)
        end = await attempt.run()
        if isinstance(end, BuildDone):
            return end
        if end.code not in _RETRIED:
            raise _error_of(end)
        losses = losses + 1 if attempt.done <= furthest else 1
        furthest = max(furthest, attempt.done)
        _log.warning("build interrupted", document_id=document.document_id, code=end.code, losses=losses)
        if end.code == "engine_lost" and losses >= MAX_LOSSES:
            raise Unavailable(
                f"The engine stopped {losses} times while it read this document at the same place. "
                "Its log says why; upload the document again to start afresh.",
                code="engine_lost",
            )
        await asyncio.sleep(_BUSY_S if end.code == "busy" else FIRST_PAUSE_S * 5 ** (losses - 1))


class _Attempt:
    """`done` is the most tokens any run has reported durable."""

    def __init__(self, engine, document, token_ids, retention, on_progress) -> None:
        self._engine = engine
        self._document = document
        self._token_ids = token_ids
        self._retention = retention
        self._on_progress = on_progress
        self._n_runs = 0
        self.done = 0

    async def run(self) -> BuildDone | Failed:
        self._n_runs += 1
        request_id = f"build_{self._document.document_id}_{self._n_runs}"
        request = BuildRequest(request_id, self._document, self._token_ids, self._retention)
        end: BuildDone | Failed = Failed("internal", "the engine ended a build without a word")
        async with aclosing(self._engine.build(request)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, BuildProgress):
                    self.done = max(self.done, event.done)
                    self._on_progress(event)
                else:
                    end = event
        return end


async def _until_alive(engine: EngineClient) -> None:
    while not engine.alive:  # noqa: ASYNC110 - an engine in another process has no event to wait for
        await asyncio.sleep(_POLL_S)


def _error_of(failed: Failed) -> ServiceError:
    match failed.code:
        case "storage":
            return StorageFull(failed.detail)
        case "too_long":
            return TooLong(failed.detail, param="file")
        case "cancelled":
            return NotFound("The document was removed while it was being read.")
        case _:
            _log.error("build failed", code=failed.code, detail=failed.detail)
            return ServiceError("The engine could not read the document; its log says why.", code=failed.code)
