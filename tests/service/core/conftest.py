"""Sessions and answers over the fake engine and a real database."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from service.core.answers import AnswerService
from service.core.clock import SystemClock
from service.core.context import pack_ids
from service.core.conversations import Conversations, Limits
from service.core.leases import Leases
from service.core.retention import Bounds
from service.core.sampling import Question
from service.core.sessions import SessionService
from service.core.streams import AnswerStream
from service.core.together import Gathering
from service.db.engine import Database
from service.db.models import DocumentRow, PageRow
from service.engine.fake import FakeEngine, digest_of
from service.engine.messages import BuildDone, BuildRequest, DocumentRef
from service.errors import ServiceError
from tests.migrated import place

OWNER = "local"
DOCUMENT_IDS = list(range(2000, 2600))
END = 7
PAGE = "The safety officer is Bartholomew Kemp. The fee is 1,275 pounds."
REF = DocumentRef(OWNER, "doc_1")


class BytePrompt:
    """One token per byte; `end` closes a turn, as `PromptTemplate` does with a model's tokens."""

    end = END

    def question(self, text: str, *, pending_ids: Sequence[int] = (), follow_up: bool = False) -> list[int]:
        closing = [END] if follow_up and list(pending_ids[-1:]) != [END] else []
        return [*pending_ids, *closing, 1, *text.encode(), 2]


class Snapshots:
    """Rebuilds through the engine, as `service.core.snapshots` does."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.error: ServiceError | None = None
        self.rebuilt: list[str] = []

    async def current(self, row: DocumentRow) -> DocumentRow:
        return row

    async def rebuild(self, document_id: str) -> BuildDone:
        self.rebuilt.append(document_id)
        if self.error is not None:
            raise self.error
        request = BuildRequest("b", DocumentRef(OWNER, document_id), DOCUMENT_IDS)
        *_, done = [event async for event in self.engine.build(request)]
        assert isinstance(done, BuildDone)
        return done


class TurnFiles:
    """Which turns' KV was removed."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.stored: list[str] = []

    def delete(self, owner_id: str, kind: str, id: str) -> dict[str, tuple[int, int]]:
        assert (owner_id, kind) == (OWNER, "turn")
        self.removed.append(id)
        return {"disk": (1, 64)}

    def turns(self) -> list[tuple[str, str]]:
        return [(OWNER, id) for id in self.stored]


class World:
    """Everything a test touches."""

    owner = OWNER
    document = REF
    n_tokens = len(DOCUMENT_IDS)
    token_digest = digest_of(DOCUMENT_IDS)
    prompt = BytePrompt()

    def __init__(self, database: Database, engine: FakeEngine) -> None:
        self.database = database
        self.engine = engine
        self.snapshots = Snapshots(engine)
        self.files = TurnFiles()
        self.conversations = self.build()

    def build(self, *, queue_limit: int = 8, grace_s: float = 0.05, prompt_digest: str = "p1") -> Conversations:
        return Conversations.over(
            self.database, self.engine, self.snapshots, self.files, prompt=BytePrompt(),
            prompt_digest=prompt_digest, clock=SystemClock(), limits=Limits(queue_limit, grace_s, 64),
            gathering=Gathering(self.engine, Bounds(room_tokens=64), most_documents=4, n_prompt=20),
            leases=Leases(self.database, SystemClock(), alone=True, lease_s=1.0),
        )  # fmt: skip

    @property
    def answers(self) -> AnswerService:
        return self.conversations.answers

    @property
    def sessions(self) -> SessionService:
        return self.conversations.sessions

    async def session(self) -> str:
        return (await self.sessions.create(OWNER, ["doc_1"])).id

    async def ask(self, session_id: str, question: str = "Who?", **options: Any) -> AnswerStream:
        return await self.answers.ask(OWNER, session_id, Question(question, **options))

    async def answer(self, session_id: str, question: str = "Who?", **options: Any) -> dict[str, Any]:
        event = await (await self.ask(session_id, question, **options)).wait_closed()
        if isinstance(event.data, ServiceError):
            raise event.data
        return event.data

    async def until_idle(self) -> None:
        async with asyncio.timeout(60):
            while self.answers.running:  # noqa: ASYNC110 - the service has no event for being idle
                await asyncio.sleep(0.005)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    path = tmp_path / "db.sqlite3"
    place(path)
    database = Database(f"sqlite+aiosqlite:///{path}")
    engine = FakeEngine(max_context=2048)
    engine.snapshots[REF] = (digest_of(DOCUMENT_IDS), len(DOCUMENT_IDS), None)
    async with database.writing() as uow:
        await uow.documents.add(document_row("doc_1"))
        await uow.documents.add(document_row("doc_2", status="parsing"))
        await uow.pages.replace("doc_1", [PageRow(document_id="doc_1", number=1, text=PAGE)])
    world = World(database, engine)
    yield world
    await world.answers.close()
    await database.close()


def document_row(id: str, status: str = "ready") -> DocumentRow:
    return DocumentRow(
        id=id, owner_id=OWNER, dedupe_key=id, title=id, filename=id, nbytes=1, sha256="0", status=status,
        page_count=1, token_count=len(DOCUMENT_IDS), token_digest=digest_of(DOCUMENT_IDS),
        token_ids=pack_ids(DOCUMENT_IDS), created_at=1.0, updated_at=1.0,
    )  # fmt: skip
