"""Builds documents and asks about them through an engine of this process, for the benchmarks of right answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.engine.digests import digest_of
from service.engine.local import LocalEngine
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Failed,
    Retention,
    Sampling,
    SpanRef,
)

MAX_TOKENS = 48
"""Of an answer."""


@dataclass
class Reply:
    """An answer at temperature 0, and what was fetched for it."""

    text: str = ""
    spans: Sequence[SpanRef] = ()
    fetch_ms: float = 0.0
    ttft_ms: float = 0.0


def document_ref(name: str) -> DocumentRef:
    return DocumentRef("recall", name)


async def build(engine: LocalEngine, name: str, ids: list[int], retention: Retention | None) -> BuildDone:
    """Raises SystemExit when it fails."""
    async for event in engine.build(BuildRequest(name, document_ref(name), ids, retention)):
        match event:
            case BuildDone():
                return event
            case Failed():
                raise SystemExit(f"the build of {name} failed: {event.detail}")
    raise SystemExit(f"the build of {name} did not end")


async def ask(
    engine: LocalEngine, name: str, ids: list[int], prompt: list[int], retention: Retention | None, session: str = "ask"
) -> Reply:
    """The reply to a question by itself. Raises SystemExit when it fails."""
    request = AnswerRequest(
        session, session, document_ref(name), digest_of(ids), len(ids), [], prompt, Sampling(max_tokens=MAX_TOKENS),
        retention=retention,
    )  # fmt: skip
    reply = Reply()
    async for event in engine.answer(request):
        match event:
            case AnswerStarted():
                reply.spans, reply.fetch_ms = event.spans, event.fetch_ms
            case AnswerText():
                reply.text += event.text
            case AnswerDone():
                reply.ttft_ms = event.ttft_ms
            case Failed():
                raise SystemExit(f"the answer failed: {event.detail}")
    await engine.release_session(session)
    return reply
