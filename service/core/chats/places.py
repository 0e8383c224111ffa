"""Where a conversation goes on: in a session whose turns are its history, so that none of them is computed again."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from service.core.chats.dialogue import Exchange
from service.core.context import pack_ids, unpack_ids
from service.core.ids import new_id
from service.core.prompts import Prompts
from service.core.results import Outcome, columns_of
from service.core.sessions import SessionService
from service.db.engine import Database
from service.db.models import SessionRow, TurnRow
from service.errors import NotFound, TooLong

ORIGIN = "chat"
_BEFORE_S = 0.001
"""What is written down was said before its session was made, as what a fork copies was: so it is told from what was
asked there."""
_MOST_LOOKED_AT = 32
"""Sessions that begin alike: forks of one, or the same first question asked many times."""


@dataclass(frozen=True, slots=True)
class Place:
    """A session whose turns are the history. `is_new`: made for this question, and of no use without it; else
    `turn_id` is the last of its turns, which the question must follow."""

    session_id: str
    is_new: bool
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A session that begins as the history does: with `n` of its exchanges, the last of which is `turn_id`."""

    session_id: str
    n: int
    turn_id: str
    ends_there: bool


class Places:
    """Finds sessions by what was said in them, and writes down what was said elsewhere."""

    def __init__(
        self, db: Database, sessions: SessionService, prompts: Prompts, max_context: Callable[[], int]
    ) -> None:
        self._db = db
        self._sessions = sessions
        self._prompts = prompts
        self._max_context = max_context

    async def of(
        self,
        owner_id: str,
        document_ids: Sequence[str],
        history: Sequence[Exchange],
        *,
        apart: bool = False,
        known: bool = True,
    ) -> Place:
        """The session in which these exchanges are the turns so far: one that is there, or a fork of one that begins
        alike; what no session has is written down, and computed with the next question. `apart`: not one that others
        may use at the same time. Not `known`: no session is looked for.

        Raises as `SessionService.create` and `fork`, and TooLong for what no context takes.
        """
        found = await self._best(owner_id, document_ids, history) if history and known else None
        if found is not None and found.n == len(history) and found.ends_there and not apart:
            return Place(found.session_id, False, found.turn_id)
        if found is None:
            row = await self._sessions.create(owner_id, document_ids, origin=ORIGIN)
        else:
            row, _ = await self._sessions.fork(
                owner_id, found.session_id, after_turn=found.turn_id, title="", origin=ORIGIN
            )
        place = Place(row.id, True)
        rest = history[found.n if found else 0 :]
        if rest:
            try:
                await self._write(row, rest)
            except BaseException:
                await asyncio.shield(self.drop(owner_id, place))
                raise
        return place

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
        if session.origin == ORIGIN and all(turn.created_at < session.created_at for turn in turns):
            return None  # its own question has not begun: the session goes again if that is refused
        said = [turn for turn in turns if turn.status == "done" or (turn.status == "cancelled" and turn.kv_id)]
        n = 0
        while n < min(len(said), len(history)) and self._is(said[n], history[n]):
            n += 1
        if not n:
            return None
        is_free = all(turn.status != "running" for turn in turns)
        return _Found(session.id, n, said[n - 1].id, n == len(said) and is_free)

    def _is(self, turn: TurnRow, exchange: Exchange) -> bool:
        same_prompt = turn.parameters.get("prompt") == self._prompts.digest
        return same_prompt and turn.question == exchange.question and turn.answer.strip() == exchange.answer.strip()

    async def _write(self, session: SessionRow, exchanges: Sequence[Exchange]) -> None:
        """Add exchanges as turns whose KV is not there: the engine computes it before the next answer."""
        async with self._db.reading() as uow:
            turns = await uow.turns.context(session.id)
        pending = unpack_ids(turns[-1].pending_ids) if turns else []
        tokens = await asyncio.to_thread(self._tokens, exchanges, pending, bool(turns))
        # Before anything is written: nobody else writes while thousands of turns are.
        if (n_tokens := sum(map(len, tokens))) >= (most := self._max_context()):
            raise TooLong(
                f"The earlier messages have {n_tokens:,} tokens; the model's context is {most:,}.", param="question"
            )
        async with self._db.writing() as uow:
            first = await uow.turns.next_ordinal(session.id)
            for n, (exchange, token_ids) in enumerate(zip(exchanges, tokens, strict=True)):
                await uow.turns.add(self._row(session, first + n, exchange, token_ids))

    def _tokens(self, exchanges: Sequence[Exchange], pending: list[int], follow_up: bool) -> list[list[int]]:
        """Of each exchange, as they would be had it been asked here."""
        template, tokenizer, tokens = self._prompts.template, self._prompts.tokenizer, []
        for exchange in exchanges:
            asked = template.question(exchange.question, pending_ids=pending, follow_up=follow_up)
            tokens.append(asked + tokenizer.encode_plain(exchange.answer))
            pending, follow_up = [], True
        return tokens

    def _row(self, session: SessionRow, ordinal: int, exchange: Exchange, token_ids: list[int]) -> TurnRow:
        turn_id = new_id("ans")
        values = columns_of(Outcome(text=exchange.answer), 0) | {"status": "done", "finish_reason": "stop"}
        return TurnRow(
            id=turn_id,
            session_id=session.id,
            ordinal=ordinal,
            question=exchange.question,
            kv_id=turn_id,
            token_ids=pack_ids(token_ids),
            parameters={"prompt": self._prompts.digest},
            created_at=session.created_at - _BEFORE_S,
            **values,
        )
