"""From a question to a job: the session's documents and turns, the prompt's tokens, the room for the
answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from service.core.access import OWNER, usable_session
from service.core.answer_run import Job
from service.core.clock import Clock
from service.core.context import Context, Prompt, answer_room
from service.core.ids import new_id
from service.core.sampling import Question
from service.core.together import Gathering, Together
from service.db.engine import Database
from service.db.models import DocumentRow, SessionRow, TurnRow
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
        gathering: Gathering,
    ) -> None:
        self._database = database
        self._engine = engine
        self._snapshots = snapshots
        self._prompt = prompt
        self._prompt_digest = prompt_digest
        self._max_answer_tokens = max_answer_tokens
        self._clock = clock
        self._gathering = gathering

    async def require_ready(self, owner_id: str, session_id: str) -> None:
        """Raises NotFound for an unknown session and one of an expired document, Forbidden for one that is shared with
        them, Conflict for a document not ready."""
        await self._session(owner_id, session_id)

    async def job(
        self, owner_id: str, session_id: str, question: Question, accepted: float, after: str | None = None
    ) -> Job:
        """A job without a stream's timers running yet. `after`: the turn that it must follow.

        Raises NotFound, Conflict (``document_not_ready``, ``model_changed``, ``session_busy``), TooLong, Invalid
        (``no_index_heads``).
        """
        session, rows = await self._session(owner_id, session_id)
        documents = [await self._snapshots.current(row) for row in rows]
        async with self._database.reading() as uow:
            turns = await uow.turns.context(session_id)
        if after is not None and (not turns or turns[-1].id != after):
            raise Conflict("The session has gone on meanwhile: fork it.", code="session_busy")
        self._require_same_prompt(turns)
        context = Context.of(documents, turns, self._together(documents))
        # Long questions take a while to tokenize; the tokenizer works outside the interpreter lock.
        asked = instructed(question.text, session.instructions)
        prompt_ids = await asyncio.to_thread(context.prompt_ids, self._prompt, asked)
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

    async def adopted(self, owner_id: str, turn: TurnRow, lease: str) -> Job:
        """The job of an answer that another process began. Raises as `job`."""
        known = turn.parameters
        question = Question(
            turn.question,
            known.get("max_tokens"),
            known.get("temperature"),
            known.get("top_p"),
            known.get("top_k"),
            tuple(known.get("stop", ())),
            known.get("seed"),
        )
        age_s = max(0.0, self._clock.now() - turn.created_at)
        job = await self.job(owner_id, turn.session_id, question, self._clock.monotonic() - age_s)
        job.answer_id, job.lease, job.adopted = turn.id, lease, True
        return job

    async def rebuild(self, context: Context, document_id: str) -> tuple[Context, BuildDone]:
        """Bring back the snapshot of one of the documents; the context as it is then."""
        done = await self._snapshots.rebuild(document_id)
        async with self._database.reading() as uow:
            document = await uow.documents.get(document_id)
        if document is None:
            raise NotFound("The document was deleted meanwhile.")
        documents = [document if row.id == document_id else row for row in context.documents]
        return replace(context, documents=documents, together=self._together(documents)), done

    async def _session(self, owner_id: str, session_id: str) -> tuple[SessionRow, Sequence[DocumentRow]]:
        async with self._database.reading() as uow:
            now = self._clock.now()
            session, documents = await usable_session(uow, owner_id, session_id, now, need=OWNER, asking=True)
        for document in documents:
            if document.status != "ready":
                raise Conflict(f"The document is {document.status}, not ready.", code="document_not_ready")
        return session, documents

    def _together(self, documents: Sequence[DocumentRow]) -> Together | None:
        return self._gathering.of(documents) if len(documents) > 1 else None

    def _require_same_prompt(self, turns: Sequence[TurnRow]) -> None:
        if any(turn.parameters.get("prompt") != self._prompt_digest for turn in turns):
            raise Conflict(
                "This session's earlier answers were given by another model or prompt: begin a new session.",
                code="model_changed",
            )


def instructed(question: str, instructions: str) -> str:
    """What the model is asked. Instructions are part of the question, not of the text before the document, which stays
    as it is: so any session can have its own, and nothing is computed again."""
    return f"{instructions}\n\n{question}" if instructions else question
