"""Where a conversation goes on: in a session whose turns are its history, so that none of them is computed again."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from service.core.chats.dialogue import Exchange
from service.core.clock import Clock
from service.core.context import pack_ids, unpack_ids
from service.core.ids import new_id
from service.core.prompts import Prompts
from service.core.results import Outcome, columns_of
from service.core.sessions import SessionService
from service.db.engine import Database
from service.db.models import SessionRow, TurnRow
from service.errors import NotFound

ORIGIN = "chat"
_MOST_LOOKED_AT = 32
"""Sessions that begin alike: forks of one, or the same first question asked many times."""


@dataclass(frozen=True, slots=True)
class Place:
    """A session whose turns are the history. `is_new`: made for this question, and of no use without it."""

    session_id: str
    is_new: bool


@dataclass(frozen=True, slots=True)
class _Found:
    """A session that begins as the history does: with `n` of its exchanges, the last of which is `turn_id`."""

    session_id: str
    n: int
    turn_id: str
    ends_there: bool


class Places:
    """Finds sessions by what was said in them, and writes down what was said elsewhere."""

    def __init__(self, db: Database, sessions: SessionService, prompts: Prompts, clock: Clock) -> None:
        self._db = db
        self._sessions = sessions
        self._prompts = prompts
        self._clock = clock

    async def of(
        self, owner_id: str, document_ids: Sequence[str], history: Sequence[Exchange], *, apart: bool = False
    ) -> Place:
        """The session in which these exchanges are the turns so far: one that is there, or a fork of one that begins
        alike; what no session has is written down, and computed with the next question. `apart`: not one that others
        may use at the same time.

        Raises as `SessionService.create` and `fork`.
        """
        found = await self._best(owner_id, document_ids, history) if history else None
        if found is not None and found.n == len(history) and found.ends_there and not apart:
            return Place(found.session_id, False)
        if found is None:
            row = await self._sessions.create(owner_id, document_ids, origin=ORIGIN)
        else:
            row, _ = await self._sessions.fork(
                owner_id, found.session_id, after_turn=found.turn_id, title="", origin=ORIGIN
            )
        rest = history[found.n if found else 0 :]
        if rest:
            await self._write(row.id, rest)
        return Place(row.id, True)

    async def drop(self, owner_id: str, place: Place) -> None:
        """Remove a session that was made for a question which was refused."""
        if place.is_new:
            with suppress(NotFound):
                await self._sessions.delete(owner_id, place.session_id)

    async def _best(self, owner_id: str, document_ids: Sequence[str], history: Sequence[Exchange]) -> _Found | None:
        best: _Found | None = None
        async with self._db.reading() as uow:
            sessions = await uow.chats.sessions_beginning(
                owner_id, document_ids[0], history[0].question, limit=_MOST_LOOKED_AT
            )
            for session in sessions:
                if session.document_ids == list(document_ids):
                    turns = await uow.turns.of_session(session.id)
                    found = self._compare(session, turns, history)
                    if found and (best is None or (found.n, found.ends_there) > (best.n, best.ends_there)):
                        best = found
        return best

    def _compare(self, session: SessionRow, turns: Sequence[TurnRow], history: Sequence[Exchange]) -> _Found | None:
        said = [turn for turn in turns if turn.status == "done" or (turn.status == "cancelled" and turn.kv_id)]
        n = 0
        while n < min(len(said), len(history)) and self._is(said[n], history[n]):
            n += 1
        if not n:
            return None
        return _Found(session.id, n, said[n - 1].id, n == len(said))

    def _is(self, turn: TurnRow, exchange: Exchange) -> bool:
        same_prompt = turn.parameters.get("prompt") == self._prompts.digest
        return same_prompt and turn.question == exchange.question and turn.answer.strip() == exchange.answer.strip()

    async def _write(self, session_id: str, exchanges: Sequence[Exchange]) -> None:
        """Add exchanges as turns whose KV is not there: the engine computes it before the next answer."""
        async with self._db.reading() as uow:
            turns = await uow.turns.context(session_id)
        pending = unpack_ids(turns[-1].pending_ids) if turns else []
        tokens = await asyncio.to_thread(self._tokens, exchanges, pending, bool(turns))
        async with self._db.writing() as uow:
            first = await uow.turns.next_ordinal(session_id)
            for n, (exchange, token_ids) in enumerate(zip(exchanges, tokens, strict=True)):
                await uow.turns.add(self._row(session_id, first + n, exchange, token_ids))

    def _tokens(self, exchanges: Sequence[Exchange], pending: list[int], follow_up: bool) -> list[list[int]]:
        """Of each exchange, as they would be had it been asked here."""
        template, tokenizer, tokens = self._prompts.template, self._prompts.tokenizer, []
        for exchange in exchanges:
            asked = template.question(exchange.question, pending_ids=pending, follow_up=follow_up)
            tokens.append(asked + tokenizer.encode_plain(exchange.answer))
            pending, follow_up = [], True
        return tokens

    def _row(self, session_id: str, ordinal: int, exchange: Exchange, token_ids: list[int]) -> TurnRow:
        turn_id = new_id("ans")
        values = columns_of(Outcome(text=exchange.answer), 0) | {"status": "done", "finish_reason": "stop"}
        return TurnRow(
            id=turn_id,
            session_id=session_id,
            ordinal=ordinal,
            question=exchange.question,
            kv_id=turn_id,
            token_ids=pack_ids(token_ids),
            parameters={"prompt": self._prompts.digest},
            created_at=self._clock.now(),
            **values,
        )
