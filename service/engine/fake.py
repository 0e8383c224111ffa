"""An engine without a model, all in asyncio: for tests of the layers above and for trying the service.
It keeps the books an engine keeps (snapshots, residency, turns, counters) and fails when told to."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict

from cache_store.fingerprint import Fingerprint
from service.engine.digests import digest_of
from service.engine.host.kept import documents_of, holds, together_ref
from service.engine.messages import (
    AnswerDone,
    AnswerEvent,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildEvent,
    BuildProgress,
    BuildRequest,
    DocumentRef,
    EngineInfo,
    EngineStats,
    Failed,
    PartRef,
    PieceLooks,
    ReleaseDone,
    Retention,
    SpanRef,
)
from service.engine.protocol import EngineLost

BLOCK_TOKENS = 256
BYTES_PER_TOKEN = 64
INDEX_NBYTES_PER_TOKEN = 8
SPAN_TOKENS = 32
FIRST_ANSWER_ID = 1000
"""The pieces of an answer get the token ids 1000, 1001, ...; the last one is left pending."""

FAKE_FINGERPRINT = Fingerprint(
    weights="fake", quantization="none", tokenizer="fake", template="fake", rope="none", kv="fake-1",
    engine="fake-1", compute_dtype="none", chunking="256",
)  # fmt: skip
_COUNTERS = ("prefilled", "decoded", "steps", "document_prefill", "running", "waiting")
LOST = Failed("engine_lost", "the engine process ended", retryable=True)
CANCELLED = Failed("cancelled", "the request was cancelled")

Reply = Sequence[str] | Callable[[AnswerRequest], Sequence[str]]


class FakeEngine:
    """An `EngineClient` whose answers are the pieces of `reply`, one token each.

    `token_delay_s` passes before each piece, `chunk_delay_s` before each 256 tokens of a build. At most
    `max_batch` answers run at once; others wait, first come first served. `resident_tokens`, `sink_multiple` and
    `n_index_heads` are what it says of itself. A question about a windowed document fetches the spans `fetched`, or
    else, after those of the turn before, the first one that is not resident. One about several documents fetches only
    `fetched`. Of every answer it says `looks`.
    """

    def __init__(
        self,
        reply: Reply = ("The ", "answer ", "is ", "42."),
        *,
        token_delay_s: float = 0.0,
        chunk_delay_s: float = 0.0,
        max_batch: int = 4,
        max_context: int = 8192,
        tail_tokens: int = 0,
        resident_tokens: int = 0,
        sink_multiple: int = 1,
        n_index_heads: int = 2,
    ) -> None:
        self.reply = reply
        self.fetched: list[SpanRef] | None = None
        self.looks: list[PieceLooks] = []
        self.token_delay_s = token_delay_s
        self.chunk_delay_s = chunk_delay_s
        self.snapshots: dict[DocumentRef, tuple[str, int, Retention | None]] = {}
        self.resident: set[DocumentRef] = set()
        self.stored_turns: dict[str, list[int]] = {}
        self.answered: list[AnswerRequest] = []
        self.built: list[BuildRequest] = []
        self._failures: dict[str, list[Failed]] = {"build": [], "answer": []}
        self._stops: dict[str, tuple[DocumentRef, asyncio.Future[Failed]]] = {}
        self._gate = asyncio.Semaphore(max_batch)
        self._counts = dict.fromkeys(("prefilled", "decoded", "steps", "document_prefill", "running", "waiting"), 0)
        self._alive = True
        self._info = EngineInfo(
            engine="fake", model_name="fake", compute_dtype="none", kv_type="k8v8",
            fingerprint=asdict(FAKE_FINGERPRINT), fingerprint_digest=FAKE_FINGERPRINT.digest,
            max_context=max_context, bytes_per_token=BYTES_PER_TOKEN, block_tokens=BLOCK_TOKENS,
            max_batch=max_batch, pid=os.getpid(), tail_tokens=tail_tokens, resident_tokens=resident_tokens,
            sink_multiple=sink_multiple, n_index_heads=n_index_heads,
        )  # fmt: skip

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

    def fail_next(self, kind: str, failure: Failed) -> None:
        """Make the next `kind` ("build" or "answer") end with `failure` before it has done anything."""
        self._failures[kind].append(failure)

    def miss_next(self, reason: str = "checksum") -> None:
        """The next answer finds its snapshot unusable: it is gone, and the answer fails as a miss."""
        self.fail_next("answer", Failed("snapshot_miss", "damaged on purpose", miss_reason=reason))

    def lose(self) -> None:
        """The engine process dies: all open requests end, nothing stays in memory, snapshots do."""
        self._alive = False
        self.resident.clear()
        for request_id in list(self._stops):
            self._stop(request_id, LOST)

    def come_back(self) -> None:
        """The engine process was started again."""
        self._alive = True

    def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        return self._guard(request, "build", self._build(request))

    def answer(self, request: AnswerRequest) -> AsyncIterator[AnswerEvent]:
        return self._guard(request, "answer", self._answer(request))

    async def cancel(self, request_id: str) -> None:
        self._stop(request_id, CANCELLED)

    async def release(self, document: DocumentRef) -> ReleaseDone:
        for request_id, (used, _) in list(self._stops.items()):
            if used == document:
                self._stop(request_id, CANCELLED)
        n_rows = _n_rows(self.snapshots.pop(document, None))
        self.resident -= {ref for ref in self.resident if ref != document and holds(ref, document)}
        was_resident = document in self.resident
        self.resident.discard(document)
        return ReleaseDone(int(was_resident), n_rows * BYTES_PER_TOKEN if was_resident else 0)

    async def release_session(self, session_id: str) -> None:
        return None

    async def stats(self) -> EngineStats:
        if not self._alive:
            raise EngineLost("the engine process ended")
        c = self._counts
        n_resident = sum(_n_rows(snapshot) for ref, snapshot in self.snapshots.items() if ref in self.resident)
        return EngineStats(
            prefilled_tokens_total=c["prefilled"], decoded_tokens_total=c["decoded"], steps_total=c["steps"],
            document_prefill_tokens_total=c["document_prefill"], running=c["running"], waiting=c["waiting"],
            resident_documents=len(self.resident), resident_nbytes=n_resident * BYTES_PER_TOKEN,
            document_references=c["running"], tail_slots_used=c["running"], rss_nbytes=0,
            documents=list(dict.fromkeys(document for ref in self.resident for document in documents_of(ref))),
        )  # fmt: skip

    async def check(self) -> float:
        if not self._alive:
            raise EngineLost("the engine process ended")
        return 0.1

    async def close(self) -> None:
        self.lose()

    def _stop(self, request_id: str, why: Failed) -> None:
        _, stop = self._stops.get(request_id, (None, None))
        if stop is not None and not stop.done():
            stop.set_result(why)

    async def _guard(self, request, kind: str, events: AsyncIterator):
        """Run `events`, ended early by cancel or loss, also while they wait."""
        if not self._alive:
            yield LOST
            return
        if self._failures[kind]:
            yield self._injected(request, kind)
            return
        stop: asyncio.Future[Failed] = asyncio.get_running_loop().create_future()
        self._stops[request.request_id] = (request.document, stop)
        try:
            while True:
                step = asyncio.ensure_future(anext(events, None))
                await _first_of(step, stop)
                if step.cancelled():
                    yield stop.result()
                    return
                if (event := step.result()) is None:
                    return
                yield event
        finally:
            self._stops.pop(request.request_id, None)
            await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    def _injected(self, request, kind: str) -> Failed:
        failure = self._failures[kind].pop(0)
        if failure.code == "snapshot_miss" and not (isinstance(request, AnswerRequest) and request.parts):
            self.snapshots.pop(request.document, None)
            self.resident.discard(request.document)
        return failure

    async def _build(self, request: BuildRequest):
        started, total = time.monotonic(), len(request.token_ids)
        self.built.append(request)
        snapshot = (digest_of(request.token_ids), total, request.retention)
        already = self.snapshots.get(request.document) == snapshot
        for done in () if already else range(0, total, BLOCK_TOKENS):
            await asyncio.sleep(self.chunk_delay_s)
            n_tokens = min(BLOCK_TOKENS, total - done)
            self._counts["prefilled"] += n_tokens
            self._counts["document_prefill"] += n_tokens
            yield BuildProgress("prefilling", done + n_tokens, total)
        if not already and request.retention and request.retention.summary_tokens:
            yield BuildProgress("compacting", total, total)
        yield BuildProgress("persisting", total, total)
        self.snapshots[request.document] = snapshot
        self.resident.add(request.document)
        yield _built(snapshot, already, time.monotonic() - started)

    async def _answer(self, request: AnswerRequest):
        arrived = time.monotonic()
        self._counts["waiting"] += 1
        try:
            await self._gate.acquire()
        finally:
            self._counts["waiting"] -= 1
        self._counts["running"] += 1
        try:
            self.answered.append(request)
            async for event in self._run(request, arrived):
                yield event
        finally:
            self._counts["running"] -= 1
            self._gate.release()

    async def _run(self, request: AnswerRequest, arrived: float):
        started = self._start(request, arrived)
        yield started
        if isinstance(started, Failed):
            return
        pieces = list(self.reply(request) if callable(self.reply) else self.reply)
        kept = pieces[: request.sampling.max_tokens]
        first = None
        for piece in kept:
            await asyncio.sleep(self.token_delay_s)
            first = first or time.monotonic()
            self._counts["decoded"] += 1
            self._counts["steps"] += 1
            yield AnswerText(piece)
        yield self._finish(request, started, len(kept), len(kept) < len(pieces), arrived, first or arrived)

    def _start(self, request: AnswerRequest, arrived: float) -> AnswerStarted | Failed:
        if (missed := self._missed(request)) is not None:
            return missed
        ref, n_rows = _rows_asked(request, self.snapshots)
        was_resident = ref in self.resident
        self.resident.add(ref)
        lost = [turn for turn in request.turns if self.stored_turns.get(turn.kv_id) != turn.token_ids]
        n_turns, n_lost = (sum(len(turn.token_ids) for turn in turns) for turns in (request.turns, lost))
        n_prefilled = n_lost + len(request.prompt_ids)
        self._counts["prefilled"] += n_prefilled
        return AnswerStarted(
            source="host" if was_resident else "disk", restored_tokens=0 if was_resident else n_rows,
            restore_ms=0.0 if was_resident else 1.0, reused_tokens=request.n_document_tokens + n_turns - n_lost,
            prefilled_tokens=n_prefilled, queue_ms=(time.monotonic() - arrived) * 1e3,
            miss_reason="absent" if lost else None, spans=(spans := self._spans(request)),
            fetch_ms=0.1 if spans else 0.0, first_pass_tokens=len(request.prompt_ids) if spans else 0,
        )  # fmt: skip

    def _missed(self, request: AnswerRequest) -> Failed | None:
        """The miss of the first of the request's documents whose snapshot cannot be used."""
        whole = PartRef(request.document, request.token_digest, request.n_document_tokens, [], request.retention)
        for part in request.parts or [whole]:
            snapshot, name = self.snapshots.get(part.document), part.document.document_id
            if snapshot is None:
                return Failed("snapshot_miss", "no such snapshot", miss_reason="absent", document_id=name)
            if snapshot != (part.token_digest, part.n_tokens, part.retention):
                return Failed("snapshot_miss", "other tokens", miss_reason="fingerprint", document_id=name)
        return None

    def _spans(self, request: AnswerRequest) -> list[SpanRef]:
        if request.parts:
            return list(self.fetched or ())
        kept, n_tokens = request.retention, request.n_document_tokens
        if kept is None or kept.sink_tokens + kept.window_tokens >= n_tokens or not self._info.n_index_heads:
            return []
        if self.fetched is not None:
            return list(self.fetched)
        last = n_tokens - kept.window_tokens
        first_cold = SpanRef(kept.sink_tokens, min(SPAN_TOKENS, last - kept.sink_tokens))
        return sorted({first_cold, *(request.turns[-1].spans if request.turns else ())})

    def _finish(
        self, request: AnswerRequest, started: AnswerStarted, n: int, cut: bool, arrived: float, first: float
    ) -> AnswerDone:
        now = time.monotonic()
        token_ids = [*request.prompt_ids, *range(FIRST_ANSWER_ID, FIRST_ANSWER_ID + n - 1)]
        if request.kv_id:
            self.stored_turns[request.kv_id] = token_ids
        return AnswerDone(
            finish_reason="length" if cut else "stop", token_ids=token_ids,
            pending_ids=[FIRST_ANSWER_ID + n - 1] if n else [], completion_tokens=n,
            ttft_ms=(first - arrived) * 1e3, total_ms=(now - arrived) * 1e3,
            decode_tokens_per_s=n / max(now - first, 1e-6),
            engine_prefilled_tokens=started.prefilled_tokens, kv_stored=bool(request.kv_id),
            kv_nbytes=len(token_ids) * BYTES_PER_TOKEN if request.kv_id else 0, looks=self.looks, steps=n,
        )  # fmt: skip


def _n_rows(snapshot: tuple[str, int, Retention | None] | None) -> int:
    """Tokens of a document that are in memory."""
    if snapshot is None:
        return 0
    _, n_tokens, kept = snapshot
    return n_tokens if kept is None else min(n_tokens, kept.sink_tokens + kept.summary_tokens + kept.window_tokens)


def _rows_asked(
    request: AnswerRequest, snapshots: dict[DocumentRef, tuple[str, int, Retention | None]]
) -> tuple[DocumentRef, int]:
    """What is in memory for an answer, and how many rows it has."""
    if not request.parts:
        return request.document, _n_rows(snapshots[request.document])
    rows = sum(last - first for part in request.parts for first, last in part.resident)
    return together_ref([part.document for part in request.parts]), rows


def _built(snapshot: tuple[str, int, Retention | None], already: bool, seconds: float) -> BuildDone:
    _, total, kept = snapshot
    n_rows, is_windowed = _n_rows(snapshot), kept is not None
    return BuildDone(
        total, -(-total // BLOCK_TOKENS), total * BYTES_PER_TOKEN, 0 if already else total, 0, seconds, already,
        resident_tokens=n_rows * is_windowed, resident_nbytes=n_rows * BYTES_PER_TOKEN * is_windowed,
        index_nbytes=total * INDEX_NBYTES_PER_TOKEN * is_windowed,
    )  # fmt: skip


async def _first_of(step: asyncio.Future, stop: asyncio.Future) -> None:
    """Wait for either; `step` runs no longer afterwards, also when the caller is cancelled meanwhile."""
    try:
        await asyncio.wait((step, stop), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not step.done():
            step.cancel()
            await asyncio.wait((step,))
