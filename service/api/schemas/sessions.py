"""Bodies of the session calls."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec

from service.api.schemas.limits import PRINTABLE, limited
from service.api.schemas.questions import AnswerBody, answer_body
from service.api.schemas.times import shown_exactly
from service.core.sessions import MAX_INSTRUCTIONS_CHARS
from service.db.models import SessionRow, TurnRow

MAX_TITLE_CHARS = 300
Instructions = Annotated[str, msgspec.Meta(max_length=MAX_INSTRUCTIONS_CHARS)]
Title = Annotated[str, msgspec.Meta(max_length=MAX_TITLE_CHARS, extra_json_schema={"pattern": PRINTABLE})]


class NewSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`document_ids` names one or several documents that are ready, each once. `instructions`: how answers are wanted
    (language, length, style); they come after the document, with every question."""

    document_ids: Annotated[list[str], limited(minItems=1, uniqueItems=True)]
    title: Title = ""
    instructions: Instructions = ""


class ForkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`after_turn`: the id of the last answer to take over; the session's last one when left out. `title` and
    `instructions`: as before when left out."""

    after_turn: str | None = None
    title: Title | None = None
    instructions: Instructions | None = None


class TurnError(msgspec.Struct, frozen=True):
    """Why a turn failed, and what to do."""

    code: str
    message: str


class TurnBody(msgspec.Struct, frozen=True):
    """A question and what came of it. `status`: `running`, `done`, `failed`, `cancelled`."""

    id: str
    question: str
    status: str
    answer: AnswerBody | None
    parameters: dict[str, Any]
    created_at: datetime
    error: TurnError | None


class UsageTotals(msgspec.Struct, frozen=True):
    """Tokens over all turns of a session."""

    turns: int
    prefilled_tokens: int
    reused_tokens: int
    completion_tokens: int


class SessionBody(msgspec.Struct, frozen=True):
    """A session without its turns. `forked_from` is told to its owner alone: others may not see that one."""

    id: str
    document_ids: list[str]
    title: str
    instructions: str
    forked_from: str | None
    created_at: datetime
    updated_at: datetime


class SessionDetail(SessionBody, frozen=True):
    """A session with its turns in order."""

    usage: UsageTotals
    turns: list[TurnBody]


class SessionList(msgspec.Struct, frozen=True):
    """Newest first; `has_more` says whether `after` the last one there are more."""

    data: list[SessionBody]
    has_more: bool


def session_body(row: SessionRow, who: str) -> SessionBody:
    """As `who` sees it."""
    return SessionBody(**_fields(row, who))


def session_detail(row: SessionRow, turns: Sequence[TurnRow], who: str) -> SessionDetail:
    """As `who` sees it."""
    return SessionDetail(**_fields(row, who), usage=_totals(turns), turns=[_turn_body(turn) for turn in turns])


def _fields(row: SessionRow, who: str) -> dict[str, Any]:
    return {
        "id": row.id,
        "document_ids": row.document_ids,
        "title": row.title,
        "instructions": row.instructions,
        "forked_from": row.forked_from if row.owner_id == who else None,
        "created_at": shown_exactly(row.created_at),
        "updated_at": shown_exactly(row.updated_at),
    }


def _turn_body(turn: TurnRow) -> TurnBody:
    over = turn.status in ("done", "cancelled")
    return TurnBody(
        id=turn.id,
        question=turn.question,
        status=turn.status,
        answer=answer_body(turn) if over else None,
        parameters={name: value for name, value in turn.parameters.items() if name != "prompt"},
        created_at=shown_exactly(turn.created_at),
        error=TurnError(turn.error_code, turn.error_detail or "") if turn.error_code else None,
    )


def _totals(turns: Sequence[TurnRow]) -> UsageTotals:
    def total(name: str) -> int:
        return sum((turn.usage or {}).get(name, 0) for turn in turns)

    return UsageTotals(len(turns), total("prefilled_tokens"), total("reused_tokens"), total("completion_tokens"))
