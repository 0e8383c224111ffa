"""From a question to a job: the session's document and turns, the prompt's tokens, the room for the
answer."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from service.core.access import usable_session
from service.core.answer_run import Job
from service.core.clock import Clock
from service.core.context import Context, Prompt, answer_room
from service.core.ids import new_id
from service.core.sampling import Question
from service.db.engine import Database
from service.db.models import DocumentRow, TurnRow
from service.engine.messages import BuildDone
from service.engine.protocol import EngineClient
from service.errors import Conflict, NotFound


class DocumentSnapshots(Protocol):
    """What answers need of `service.core.snapshots`."""

    async def current(self, row: DocumentRow) -> DocumentRow:
        """The row with tokens of the prompt as it is now. Raises TooLong."""
        ...

    async def rebuild(self, document_id: str) -> BuildDone:
        """Bring back a lost snapshot. Raises NotFound, Conflict, TooLong, StorageFull, Unavailable."""
        ...


class Preparation:
    """`prompt_digest` names tokenizer and template: turns made with another one cannot be gone on from."""

    def __init__(
        self,
        database: Database,
        engine: EngineClient,
        snapshots: DocumentSnapshots,
        prompt: Prompt,
        prompt_digest: str,
        max_answer_tokens: int,
        clock: Clock,
    ) -> None:
        self._database = database
        self._engine = engine
        self._snapshots = snapshots
        self._prompt = prompt
        self._prompt_digest = prompt_digest
        self._max_answer_tokens = max_answer_tokens
        self._clock = clock

    async def require_ready(self, owner_id: str, session_id: str) -> None:
        """Raises NotFound for an unknown session and one of an expired document, Conflict for a document not ready."""
        await self._document(owner_id, session_id)

    async def job(self, owner_id: str, session_id: str, question: Question, accepted: float) -> Job:
        """A job without a stream's timers running yet.

        Raises NotFound, Conflict (``document_not_ready``, ``model_changed``), TooLong, Invalid.
        """
        document = await self._snapshots.current(await self._document(owner_id, session_id))
        async with self._database.reading() as uow:
            turns = await uow.turns.context(session_id)
        self._require_same_prompt(turns)
        context = Context.of(document, turns)
        # Long questions take a while to tokenize; the tokenizer works outside the interpreter lock.
        prompt_ids = await asyncio.to_thread(context.prompt_ids, self._prompt, question.text)
        room = answer_room(
            context,
            len(prompt_ids),
            question.max_tokens,
            engine=self._engine.info,
            limit=self._max_answer_tokens,
        )
        return Job(
            answer_id=new_id("ans"),
            owner_id=owner_id,
            session_id=session_id,
            question=question,
            prompt_digest=self._prompt_digest,
            context=context,
            prompt_ids=prompt_ids,
            sampling=question.sampling(room),
            accepted=accepted,
        )

    async def rebuild(self, document_id: str) -> tuple[DocumentRow, BuildDone]:
        """Bring back the document's snapshot; the row as it is then."""
        done = await self._snapshots.rebuild(document_id)
        async with self._database.reading() as uow:
            document = await uow.documents.get(document_id)
        if document is None:
            raise NotFound("The document was deleted meanwhile.")
        return document, done

    async def _document(self, owner_id: str, session_id: str) -> DocumentRow:
        async with self._database.reading() as uow:
            _, document = await usable_session(uow, owner_id, session_id, self._clock.now())
        if document.status != "ready":
            raise Conflict(f"The document is {document.status}, not ready.", code="document_not_ready")
        return document

    def _require_same_prompt(self, turns: Sequence[TurnRow]) -> None:
        if any(turn.parameters.get("prompt") != self._prompt_digest for turn in turns):
            raise Conflict(
                "This session's earlier answers were given by another model or prompt: begin a new session.",
                code="model_changed",
            )
