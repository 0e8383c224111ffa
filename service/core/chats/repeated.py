"""Long texts in prompts: those that are a document's resume from its snapshot, those that come again become one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from service.core.chats.texts import BLANK, INLINE, PROMPT, message_digest
from service.core.clock import Clock
from service.core.prompts import Prompts
from service.core.uploads import Uploads, UploadSettings
from service.db.engine import Database
from service.db.models import DocumentRow
from service.errors import ServiceError

_BLANK_TEXT = "There is no document in this conversation. Answer from what is said in it.\n"
_TOUCH_S = 60.0
_log = structlog.get_logger("preread.chats")


@dataclass(frozen=True, slots=True)
class Habits:
    """A text of `least_tokens` that came `repeats` times becomes a document of whoever sends it (0 tokens: none does);
    what chats made goes `ttl_s` after its last use."""

    least_tokens: int
    repeats: int
    ttl_s: float


class RepeatedTexts:
    """Each owner's own: nobody's prompt is known, or faster, because another one sent it."""

    def __init__(self, db: Database, uploads: Uploads, prompts: Prompts, clock: Clock, habits: Habits) -> None:
        self._db = db
        self._uploads = uploads
        self._prompts = prompts
        self._clock = clock
        self._habits = habits

    async def long_ones(self, texts: Sequence[str]) -> list[int]:
        """Which of these texts are worth a snapshot."""
        least = self._habits.least_tokens
        if not least:
            return []
        return [
            n for n, text in enumerate(texts) if len(text.encode()) >= least and await self._n_tokens(text) >= least
        ]

    async def document_of(self, owner_id: str, text: str) -> str | None:
        """The owner's document that is this text, and ready."""
        digest = await asyncio.to_thread(message_digest, text)
        async with self._db.reading() as uow:
            row = await uow.chats.document_of_text(owner_id, digest, self._clock.now())
        if row is None:
            return None
        await self.touch(row)
        return row.id

    async def see(self, owner_id: str, text: str, *, may_keep: bool) -> None:
        """Count a long text that is no document's; the time after which it has come often enough, make one of it,
        unless a quota or a full disk forbids it: then it is computed, as before."""
        digest = await asyncio.to_thread(message_digest, text)
        async with self._db.writing() as uow:
            row = await uow.chats.see_prompt(owner_id, digest, self._clock.now())
            made = await uow.documents.get(row.document_id, owner_id) if row.document_id else None
        if row.seen < self._habits.repeats or not may_keep or made is not None:
            return
        try:
            await self.keep(owner_id, text)
        except ServiceError as error:
            _log.info("a repeated prompt is not kept", code=error.code)

    async def keep(self, owner_id: str, text: str) -> str:
        """Make a document of a text; its id. Raises as an upload does."""
        settings = UploadSettings("prompt.txt", "A repeated prompt", ttl_s=int(self._habits.ttl_s), purpose=PROMPT)
        row, _ = await self._uploads.take(owner_id, [text.encode(errors="replace")], settings)
        digest = await asyncio.to_thread(message_digest, text)
        async with self._db.writing() as uow:
            await uow.chats.set_prompt_document(owner_id, digest, row.id)
        return row.id

    async def blank(self, owner_id: str) -> str:
        """The owner's document for conversations without one, which the engine needs too."""
        digest = message_digest(_BLANK_TEXT)
        async with self._db.reading() as uow:
            row = await uow.chats.document_of_text(owner_id, digest, self._clock.now())
        if row is None:
            settings = UploadSettings("blank.txt", "Conversations without a document", purpose=BLANK)
            row, _ = await self._uploads.take(owner_id, [_BLANK_TEXT.encode()], settings)
        return row.id

    async def touch(self, row: DocumentRow) -> None:
        """What chats made lives on when it is used."""
        until = self._clock.now() + self._habits.ttl_s
        if row.expires_at is None or row.purpose not in (PROMPT, INLINE) or until - row.expires_at < _TOUCH_S:
            return
        async with self._db.writing() as uow:
            now = await uow.documents.get(row.id)
            if now is not None and now.purpose == row.purpose:  # it may have been uploaded meanwhile
                await uow.documents.change(row.id, expires_at=until)

    async def forget(self) -> None:
        """Texts that did not come again."""
        async with self._db.writing(alone=False) as uow:
            await uow.chats.forget_prompts(self._clock.now() - self._habits.ttl_s)

    async def _n_tokens(self, text: str) -> int:
        return len(await asyncio.to_thread(self._prompts.tokenizer.encode_plain, text))
