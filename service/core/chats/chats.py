"""Asks the last question of a conversation that came whole."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from service.core import statuses
from service.core.access import OWNER
from service.core.answers import AnswerService
from service.core.chats.dialogue import Dialogue, Exchange, Message, dialogue_of
from service.core.chats.places import Places
from service.core.chats.repeated import RepeatedTexts
from service.core.chats.stored import StoredResponses
from service.core.chats.texts import BLANK
from service.core.documents import DocumentService
from service.core.repeats import Repeat, Repeated
from service.core.sampling import Question
from service.core.streams import AnswerStream
from service.db.engine import Database
from service.errors import Conflict, Forbidden, NotFound, TooLong, Unavailable

_WAIT_AGAIN_S = 10
_NOT_FOR_LINKS = "A link is for one thing: name its document in the request."


@dataclass(frozen=True, slots=True)
class Request:
    """`question` has the parameters, and no text. `previous`: the stored response that the messages follow. `may_keep`:
    whether whoever asks may make documents, `is_link` whether that may be anybody."""

    messages: Sequence[Message]
    question: Question
    document_ids: Sequence[str] = ()
    previous: str | None = None
    may_keep: bool = False
    is_link: bool = False
    repeat: Repeat | None = None


@dataclass(slots=True)
class Chat:
    """A request whose documents are known. `long_texts` could be documents, should they be too long for a question."""

    owner_id: str
    request: Request
    document_ids: list[str]
    messages: list[Message]
    before: Sequence[Exchange] = ()
    is_ready: bool = True
    long_texts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def dialogue(self) -> Dialogue:
        return dialogue_of(self.messages, self.before)


class Chats:
    """`open` a request, which refuses what can be refused at once; then `ask` it, which may have to wait for
    documents."""

    def __init__(
        self,
        db: Database,
        documents: DocumentService,
        answers: AnswerService,
        places: Places,
        repeated: RepeatedTexts,
        stored: StoredResponses,
        wait_s: float,
    ) -> None:
        self._db = db
        self._documents = documents
        self._answers = answers
        self._places = places
        self._repeated = repeated
        self._stored = stored
        self._wait_s = wait_s

    async def open(self, owner_id: str, request: Request) -> Chat:
        """Raises NotFound, Invalid, Forbidden, Conflict for a document that failed, and as an upload does."""
        chat = Chat(owner_id, request, [], list(request.messages))
        before: list[str] = []
        if request.previous is not None:
            previous = await self._stored.previous(owner_id, request.previous)
            before, chat.before = previous.document_ids, previous.exchanges
        named = [*before, *request.document_ids, *(each for m in request.messages for each in m.document_ids)]
        chat.document_ids = list(dict.fromkeys(named))
        _ = chat.dialogue  # is there a question at all?
        if not chat.document_ids:
            await self._find_document(chat)
        views = [await self._documents.get(owner_id, document_id) for document_id in chat.document_ids]
        chat.is_ready = all(view.row.status in statuses.TERMINAL for view in views)
        for view in views:
            if view.access == OWNER:
                await self._repeated.touch(view.row)
        # What began without a document has some now.
        chat.document_ids = [view.row.id for view in views if view.row.purpose != BLANK] or chat.document_ids
        return chat

    async def ask(self, chat: Chat) -> AnswerStream:
        """The answer's stream, once the documents have been read. Raises as `AnswerService.ask` and
        `SessionService.create`, and Unavailable (``document_not_ready``) when reading takes longer than a request is
        kept waiting."""
        await self.wait(chat)
        try:
            return await self._ask(chat)
        except TooLong:
            if not chat.long_texts or not chat.request.may_keep:
                raise
        message, text = chat.long_texts[0]
        await self._use(
            chat, await self._repeated.keep(chat.owner_id, chat.messages[message].texts[text]), message, text
        )
        await self.wait(chat)
        return await self._ask(chat)

    async def _find_document(self, chat: Chat) -> None:
        """A document that one of the texts is; else the blank one, and the long texts are counted."""
        if chat.request.is_link:
            raise Forbidden(_NOT_FOR_LINKS, code="not_for_links")
        owner_id, may_keep = chat.owner_id, chat.request.may_keep
        places = [
            (m, t) for m, each in enumerate(chat.messages) if each.role != "assistant" for t in range(len(each.texts))
        ]
        texts = [chat.messages[m].texts[t] for m, t in places]
        asked = [n for n in await self._repeated.long_ones(texts) if self._is_asked_without(chat, *places[n])]
        for n in asked:
            if (document_id := await self._repeated.document_of(owner_id, texts[n])) is not None:
                return await self._use(chat, document_id, *places[n])
        for n in asked:
            await self._repeated.see(owner_id, texts[n], may_keep=may_keep)
        chat.long_texts = [places[n] for n in asked]
        chat.document_ids = [await self._repeated.blank(owner_id)]
        return None

    def _is_asked_without(self, chat: Chat, message: int, text: int) -> bool:
        """Whether a question is left when a text is taken out."""
        rest = [each.without(text) if m == message else each for m, each in enumerate(chat.messages)]
        return bool(rest) and any(part.strip() for part in _last_texts(rest))

    async def _use(self, chat: Chat, document_id: str, message: int, text: int) -> None:
        """Let a document stand for a text."""
        chat.document_ids = [document_id]
        chat.messages[message] = chat.messages[message].without(text)
        chat.long_texts = []

    async def wait(self, chat: Chat) -> None:
        """For its documents. Raises as `ask`."""
        try:
            async with asyncio.timeout(self._wait_s):
                for document_id in chat.document_ids:
                    async for _ in self._documents.changes(chat.owner_id, document_id):
                        pass
        except TimeoutError:
            raise Unavailable(
                "A document of this request is still being read: ask again.",
                code="document_not_ready",
                retry_after_s=_WAIT_AGAIN_S,
            ) from None

    async def _ask(self, chat: Chat) -> AnswerStream:
        if (repeated := await self._repeated_answer(chat)) is not None:
            return repeated
        dialogue, owner_id = chat.dialogue, chat.owner_id
        question = replace(chat.request.question, text=dialogue.question)
        for apart in (False, True):
            # Whoever has a link has the sessions of all who have it: what one says must not lead into another's.
            place = await self._places.of(
                owner_id, chat.document_ids, dialogue.history, apart=apart, known=not chat.request.is_link
            )
            try:
                return await self._answers.ask(
                    owner_id, place.session_id, question, anywhere=chat.request.repeat, after=place.turn_id
                )
            except Repeated:
                await self._places.drop(owner_id, place)
                break
            except Conflict as error:
                await self._places.drop(owner_id, place)
                if apart or error.code != "session_busy":
                    raise
            except BaseException:
                await asyncio.shield(self._places.drop(owner_id, place))
                raise
        if (repeated := await self._repeated_answer(chat)) is None:
            raise NotFound("The answer to this Idempotency-Key was deleted meanwhile.")
        return repeated

    async def _repeated_answer(self, chat: Chat) -> AnswerStream | None:
        """The answer that the same request has begun before."""
        if (repeat := chat.request.repeat) is None:
            return None
        async with self._db.reading() as uow:
            turn = await repeat.answer(uow, "")
        return await self._answers.stream(chat.owner_id, turn.session_id, turn.id) if turn is not None else None


def _last_texts(messages: Sequence[Message]) -> list[str]:
    """Of what was said after the last answer."""
    texts: list[str] = []
    for message in messages:
        texts = [] if message.role == "assistant" else [*texts, *message.texts]
    return texts
