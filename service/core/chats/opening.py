"""The use cases of the OpenAI-compatible API, built together."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from service.core import datadir
from service.core.adapters import Adapters
from service.core.chats.chats import Chats
from service.core.chats.parts import PartUploads
from service.core.chats.places import Places
from service.core.chats.repeated import Habits, RepeatedTexts
from service.core.chats.stored import StoredResponses
from service.core.conversations import Conversations
from service.core.documents import DocumentService
from service.core.quotas import Quotas
from service.core.uploads import Uploads
from service.errors import NotFound


@dataclass(frozen=True, slots=True)
class OpenChats:
    """`cleaning`: what is to be done now and then. `model` is the name by which the served model is asked for, since
    `model_made_at` (Unix time)."""

    chats: Chats
    responses: StoredResponses
    parts: PartUploads
    repeated: RepeatedTexts
    model: str
    model_made_at: int
    ttl_s: float
    cleaning: Sequence[Callable[[], Awaitable[None]]]


def open_chats(
    adapters: Adapters, documents: DocumentService, uploads: Uploads, conversations: Conversations, quotas: Quotas
) -> OpenChats:
    """Over what the other use cases are built on."""
    settings, db, clock, sessions = adapters.settings, adapters.db, adapters.clock, conversations.sessions
    habits = Habits(settings.prompt_tokens, settings.prompt_repeats, settings.chat_ttl_s)
    repeated = RepeatedTexts(db, uploads, adapters.prompts, clock, habits)
    stored = StoredResponses(db, sessions, clock)
    places = Places(db, sessions, adapters.prompts, lambda: adapters.engine.info.max_context)
    parts = PartUploads(
        db,
        uploads,
        settings.data_dir / "uploads",
        clock,
        quotas,
        max_nbytes=settings.max_upload_bytes,
        check_free=lambda nbytes: datadir.check_free(settings, nbytes),
    )

    async def remove_old_sessions() -> None:
        async with db.reading() as uow:
            old = await uow.chats.old_sessions(clock.now() - settings.chat_ttl_s)
        for owner_id, session_id in old:
            with suppress(NotFound):  # removed meanwhile
                await sessions.remove(owner_id, session_id)

    return OpenChats(
        chats=Chats(db, documents, conversations.answers, places, repeated, stored, settings.chat_wait_s),
        responses=stored,
        parts=parts,
        repeated=repeated,
        model=settings.model_dir.name,
        model_made_at=int(settings.model_dir.stat().st_mtime) if settings.model_dir.is_dir() else 0,
        ttl_s=settings.chat_ttl_s,
        cleaning=(repeated.forget, parts.clean, remove_old_sessions),
    )
