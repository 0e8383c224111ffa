"""The result of an answer as clients see it: text, citations, provenance, and an honest account of the
work."""

from dataclasses import asdict, dataclass, field
from typing import Any

from service.core.citations import Cited
from service.core.provenance import Provenance
from service.db.models import TurnRow
from service.engine.messages import AnswerDone, AnswerStarted, SpanRef
from service.errors import ServiceError


@dataclass(slots=True)
class Rebuilt:
    """A document's snapshot was missing and was brought back for this answer. `n_tokens` had to be computed."""

    miss_reason: str
    n_tokens: int
    ms: float


@dataclass(slots=True)
class Outcome:
    """What an answer came to. `error` is set when it failed, `done` when the engine ended it in order."""

    text: str = ""
    started: AnswerStarted | None = None
    done: AnswerDone | None = None
    error: ServiceError | None = None
    cancelled: bool = False
    rebuilt: Rebuilt | None = None
    cited: Cited = field(default_factory=Cited)
    provenance: list[Provenance] = field(default_factory=list)
    notice: str | None = None
    queue_ms: float = 0.0
    ttft_ms: float | None = None
    total_ms: float = 0.0

    @property
    def status(self) -> str:
        if self.error is not None:
            return "failed"
        return "cancelled" if self.finish_reason == "cancelled" else "done"

    @property
    def finish_reason(self) -> str | None:
        if self.done is not None:
            return self.done.finish_reason
        return "cancelled" if self.cancelled else None

    @property
    def spans(self) -> list[SpanRef]:
        """What was fetched."""
        return self.started.spans if self.started else []


def usage_of(outcome: Outcome, n_document_tokens: int) -> dict[str, Any]:
    """Tokens. What a rebuild computed counts as prefilled, not as reused, although the answer then resumed
    from it."""
    started, rebuilt = outcome.started, outcome.rebuilt.n_tokens if outcome.rebuilt else 0
    return {
        "document_tokens": n_document_tokens,
        "reused_tokens": max(0, started.reused_tokens - rebuilt) if started else 0,
        "prefilled_tokens": (started.prefilled_tokens if started else 0) + rebuilt,
        "completion_tokens": outcome.done.completion_tokens if outcome.done else 0,
        "first_pass_tokens": started.first_pass_tokens if started else 0,
        "second_pass_tokens": started.second_pass_tokens if started else 0,
    }


def cache_of(outcome: Outcome) -> dict[str, Any]:
    """Where the document's KV came from. `miss_reason` is that of the snapshot, else of an earlier turn's
    KV."""
    started, rebuilt = outcome.started, outcome.rebuilt
    reason = rebuilt.miss_reason if rebuilt else None
    if started is None or (rebuilt is not None and rebuilt.n_tokens):
        return {"source": "none", "restored_tokens": 0, "restore_ms": 0.0, "miss_reason": reason}
    return {
        "source": started.source,
        "restored_tokens": started.restored_tokens,
        "restore_ms": round(started.restore_ms, 3),
        "miss_reason": reason or started.miss_reason,
    }


def timings_of(outcome: Outcome) -> dict[str, Any]:
    """Milliseconds from the moment the question was accepted; waiting and a rebuild are in them."""
    return {
        "queue_ms": round(outcome.queue_ms, 3),
        "restore_ms": round(outcome.started.restore_ms, 3) if outcome.started else 0.0,
        "ttft_ms": round(outcome.ttft_ms, 3) if outcome.ttft_ms is not None else None,
        "total_ms": round(outcome.total_ms, 3),
        "decode_tokens_per_s": round(outcome.done.decode_tokens_per_s, 3) if outcome.done else 0.0,
        "fetch_ms": round(outcome.started.fetch_ms, 3) if outcome.started else 0.0,
        "steps": outcome.done.steps if outcome.done else 0,
        "drafted_tokens": outcome.done.drafted_tokens if outcome.done else 0,
        "accepted_tokens": outcome.done.accepted_tokens if outcome.done else 0,
    }


def columns_of(outcome: Outcome, n_document_tokens: int) -> dict[str, Any]:
    """The columns of the turn's row that show the result."""
    error = outcome.error
    return {
        "answer": outcome.text,
        "status": outcome.status,
        "finish_reason": outcome.finish_reason,
        "error_code": error.code if error else None,
        "error_detail": error.detail if error else None,
        "citations": [asdict(citation) for citation in outcome.cited.citations],
        "unsupported": [asdict(part) for part in outcome.cited.unsupported],
        "provenance": [asdict(part) for part in outcome.provenance],
        "notice": outcome.notice,
        "usage": usage_of(outcome, n_document_tokens),
        "cache": cache_of(outcome),
        "timings": timings_of(outcome),
    }


def citation_of(stored: dict[str, Any]) -> dict[str, Any]:
    """A citation as clients see it; one that an earlier version stored says no places."""
    places = {"answer_start": None, "answer_end": None, "page_start": None, "page_end": None}
    return {**places, "attention": None, "label": None, **stored}


def result_of(turn: TurnRow) -> dict[str, Any]:
    """The answer object of the REST contract, also the body of `done`."""
    return {
        "id": turn.id,
        "answer": turn.answer,
        "finish_reason": turn.finish_reason,
        "citations": [citation_of(citation) for citation in turn.citations],
        "unsupported": turn.unsupported or [],
        "provenance": turn.provenance,
        "notice": turn.notice,
        "usage": {"first_pass_tokens": 0, "second_pass_tokens": 0, **turn.usage},
        "cache": turn.cache,
        "timings": {"fetch_ms": 0.0, **turn.timings},
    }
