"""Answers over the fake engine and a real database: context, failures, rebuilds, abandonment, recovery."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text as sql
from sqlalchemy.exc import OperationalError

from service.core.answers import AnswerService
from service.core.clock import SystemClock
from service.core.context import pack_ids
from service.core.conversations import Conversations, Limits
from service.core.sampling import Question
from service.core.sessions import SessionService
from service.core.streams import AnswerStream, StreamEvent
from service.db.engine import Database
from service.db.migrations import upgrade
from service.db.models import DocumentRow, PageRow
from service.engine.fake import FakeEngine, digest_of
from service.engine.messages import BuildRequest, DocumentRef, Failed
from service.errors import Busy, Conflict, Invalid, NotFound, ServiceError, StorageFull, TooLong, Unavailable

pytestmark = pytest.mark.anyio
OWNER = "local"
DOCUMENT_IDS = list(range(2000, 2600))
END = 7
PAGE = "The safety officer is Bartholomew Kemp. The fee is 1,275 pounds."
REF = DocumentRef(OWNER, "doc_1")


class BytePrompt:
    """One token per byte; END closes a turn, as `PromptTemplate` does with a model's tokens."""

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

    async def rebuild(self, document_id: str) -> None:
        self.rebuilt.append(document_id)
        if self.error is not None:
            raise self.error
        async for _ in self.engine.build(BuildRequest("b", DocumentRef(OWNER, document_id), DOCUMENT_IDS)):
            pass


class TurnFiles:
    """Which turns' KV was removed."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def delete(self, owner_id: str, kind: str, id: str) -> tuple[int, int]:
        assert (owner_id, kind) == (OWNER, "turn")
        self.removed.append(id)
        return 1, 64


class World:
    """Everything a test touches."""

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
        async with asyncio.timeout(5):
            while self.answers.running:  # noqa: ASYNC110 - the service has no event for being idle
                await asyncio.sleep(0.005)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}"
    await upgrade(url)
    database = Database(url)
    engine = FakeEngine(max_context=2048)
    engine.snapshots[REF] = (digest_of(DOCUMENT_IDS), len(DOCUMENT_IDS))
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


async def test_answer_has_every_field_of_the_contract(world: World) -> None:
    world.engine.reply = ["The fee ", "is 1,275 ", "pounds."]
    answer = await world.answer(await world.session(), "How much is the fee?")
    prompt = BytePrompt().question("How much is the fee?")
    assert answer["answer"] == "The fee is 1,275 pounds."
    assert answer["finish_reason"] == "stop"
    assert answer["citations"] == [
        {"document_id": "doc_1", "page": 1, "quote": "The fee is 1,275 pounds.", "score": 1.0}
    ]
    assert answer["provenance"] == [{"document_id": "doc_1", "first_page": 1, "last_page": 1, "mode": "verbatim"}]
    assert answer["usage"] == {
        "document_tokens": 600, "reused_tokens": 600, "prefilled_tokens": len(prompt), "completion_tokens": 3,
    }  # fmt: skip
    assert answer["cache"] == {
        "source": "disk", "restored_tokens": 600, "restore_ms": 1.0, "miss_reason": None,
    }  # fmt: skip
    assert set(answer["timings"]) == {
        "queue_ms", "restore_ms", "ttft_ms", "total_ms", "decode_tokens_per_s",
    }  # fmt: skip
    assert answer["timings"]["total_ms"] >= answer["timings"]["ttft_ms"] > 0


async def test_follow_up_builds_on_stored_tokens_and_pending_ids(world: World) -> None:
    session_id = await world.session()
    first = await world.answer(session_id, "One?")
    second = await world.answer(session_id, "Two?")
    asked = world.engine.answered
    assert asked[0].turns == []
    assert [turn.kv_id for turn in asked[1].turns] == [first["id"]]
    assert asked[1].turns[0].token_ids == world.engine.stored_turns[first["id"]]
    pending = [1000 + len(world.engine.reply) - 1]
    assert asked[1].prompt_ids == [*pending, END, 1, *b"Two?", 2]
    assert second["usage"]["reused_tokens"] == 600 + len(asked[1].turns[0].token_ids)
    assert second["usage"]["prefilled_tokens"] == len(asked[1].prompt_ids)


async def test_follow_up_after_a_restart_is_the_same_request(world: World) -> None:
    session_id = await world.session()
    await world.answer(session_id, "One?")
    world.conversations = world.build()
    await world.conversations.recover()
    await world.answer(session_id, "Two?")
    assert len(world.engine.answered[1].turns) == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"question": "  \n"}, Invalid, "empty"),
        ({"max_tokens": 0}, Invalid, "0; it must be from 1 to 64"),
        ({"max_tokens": -1}, Invalid, "-1"),
        ({"max_tokens": 10**9}, Invalid, "1 to 64"),
        ({"temperature": -0.1}, Invalid, "temperature"),
        ({"top_p": 0.0}, Invalid, "top_p"),
        ({"top_k": -1}, Invalid, "top_k"),
        ({"stop": ("",)}, Invalid, "stop"),
        ({"seed": 2**70}, Invalid, "seed"),
        ({"question": "x" * 5000}, TooLong, "5002"),
        ({"question": "x" * 1420, "max_tokens": 60}, TooLong, "26 are left"),
    ],
)
async def test_refusals_keep_nothing(world: World, options: dict[str, Any], error: type[Exception], words: str) -> None:
    session_id = await world.session()
    with pytest.raises(error, match=words):
        await world.answer(session_id, **{"question": "Who?", **options})
    assert (await world.sessions.get(OWNER, session_id))[1] == []
    assert (await world.answer(session_id))["finish_reason"] == "stop"


async def test_answers_are_cut_to_the_room_that_is_left(world: World) -> None:
    await world.answer(await world.session(), "x" * 1420)
    assert world.engine.answered[0].sampling.max_tokens == 2048 - 600 - 1422


async def test_a_session_that_holds_as_much_as_the_engine_can(world: World) -> None:
    world.engine = FakeEngine(max_context=100_000, tail_tokens=300)
    world.engine.snapshots[REF] = (digest_of(DOCUMENT_IDS), len(DOCUMENT_IDS))
    world.conversations = world.build()
    session_id = await world.session()
    await world.answer(session_id, "x" * 200)
    with pytest.raises(TooLong, match="room for 300 tokens beside its document, the 1 earlier turns 205"):
        await world.ask(session_id, "y" * 100)


async def test_unknown_and_foreign_sessions(world: World) -> None:
    session_id = await world.session()
    for owner, id in ((OWNER, "ses_no"), ("someone", session_id)):
        with pytest.raises(NotFound):
            await world.answers.ask(owner, id, Question("Who?"))
        with pytest.raises(NotFound):
            await world.answers.stream(owner, id, "ans_no")


async def test_sessions_need_one_ready_document(world: World) -> None:
    with pytest.raises(NotFound):
        await world.sessions.create(OWNER, ["doc_no"])
    with pytest.raises(NotFound):
        await world.sessions.create("someone", ["doc_1"])
    with pytest.raises(Invalid, match="2 were given"):
        await world.sessions.create(OWNER, ["doc_1", "doc_1"])
    with pytest.raises(Invalid):
        await world.sessions.create(OWNER, [])
    with pytest.raises(Conflict, match="parsing"):
        await world.sessions.create(OWNER, ["doc_2"])


async def test_second_question_at_once_is_refused(world: World) -> None:
    world.engine.token_delay_s = 0.02
    session_id = await world.session()
    first = await world.ask(session_id)
    with pytest.raises(Conflict) as refused:
        await world.ask(session_id)
    assert refused.value.code == "session_busy"
    await first.wait_closed()
    assert (await world.answer(session_id))["answer"]


async def test_done_means_that_the_next_question_may_come(world: World) -> None:
    session_id = await world.session()
    for _ in range(5):
        async for event in (await world.ask(session_id)).events():
            last = event
        assert last.name == "done"


async def test_fifty_questions_on_a_queue_of_eight(world: World) -> None:
    world.engine.token_delay_s = 0.005
    sessions = [await world.session() for _ in range(50)]
    results = await asyncio.gather(*(world.answer(s) for s in sessions), return_exceptions=True)
    refused = [result for result in results if isinstance(result, Busy)]
    done = [result for result in results if isinstance(result, dict)]
    assert len(done) == 8
    assert len(refused) == 42
    assert all(error.retry_after_s >= 1 for error in refused)
    assert world.conversations.admission.admitted == 0


async def test_engine_that_is_down(world: World) -> None:
    session_id = await world.session()
    world.engine.lose()
    with pytest.raises(Unavailable) as refused:
        await world.ask(session_id)
    assert refused.value.retry_after_s >= 1
    world.engine.come_back()
    assert (await world.answer(session_id))["answer"]


async def test_engine_lost_in_mid_answer(world: World) -> None:
    world.engine.token_delay_s = 0.02
    session_id = await world.session()
    stream = await world.ask(session_id)
    events: list[StreamEvent] = []
    async for event in stream.events():
        events.append(event)
        if len(events) == 1:
            world.engine.lose()
    assert [e.name for e in events] == ["token", "error"]
    assert isinstance(events[-1].data, Unavailable)
    assert events[-1].data.code == "engine_lost"
    _, turns = await world.sessions.get(OWNER, session_id)
    assert (turns[0].status, turns[0].error_code, turns[0].answer) == ("failed", "engine_lost", "The ")
    world.engine.come_back()
    await world.answer(session_id)
    assert world.engine.answered[-1].turns == []
    again = await world.answers.stream(OWNER, session_id, stream.answer_id)
    assert [(e.id, e.name) async for e in again.events(events[0].id)] == [(events[-1].id, "error")]


@pytest.mark.parametrize("reason", ["checksum", "truncated", "fingerprint", "canary"])
async def test_lost_snapshot_is_rebuilt_and_told(world: World, reason: str) -> None:
    session_id = await world.session()
    await world.answer(session_id, "One?")
    world.engine.miss_next(reason)
    answer = await world.answer(session_id, "Two?")
    request = world.engine.answered[-1]
    assert world.snapshots.rebuilt == ["doc_1"]
    assert answer["answer"] == "The answer is 42."
    assert answer["cache"] == {
        "source": "none", "restored_tokens": 0, "restore_ms": 0.0, "miss_reason": reason,
    }  # fmt: skip
    assert answer["usage"]["prefilled_tokens"] == 600 + len(request.prompt_ids)
    assert answer["usage"]["reused_tokens"] == len(request.turns[0].token_ids)


async def test_snapshot_lost_twice_is_not_tried_for_ever(world: World) -> None:
    world.engine.miss_next()
    world.engine.miss_next()
    with pytest.raises(Unavailable) as failed:
        await world.answer(await world.session())
    assert failed.value.code == "snapshot_miss"
    assert world.snapshots.rebuilt == ["doc_1"]


async def test_rebuild_that_fails(world: World) -> None:
    session_id = await world.session()
    world.engine.miss_next()
    world.snapshots.error = StorageFull("no room")
    with pytest.raises(StorageFull):
        await world.answer(session_id)
    world.snapshots.error = None
    assert (await world.answer(session_id))["cache"]["source"] == "none"


@pytest.mark.parametrize(
    ("code", "kind"),
    [("busy", Busy), ("too_long", TooLong), ("storage", StorageFull), ("internal", ServiceError)],
)
async def test_failures_of_the_engine(world: World, code: str, kind: type[ServiceError]) -> None:
    session_id = await world.session()
    world.engine.fail_next("answer", Failed(code, "for a reason"))
    with pytest.raises(kind):
        await world.answer(session_id)
    assert (await world.answer(session_id))["answer"]
    assert world.engine.answered[-1].turns == []


async def test_abandoned_answer_is_cancelled_and_the_session_goes_on(world: World) -> None:
    world.engine.reply = ["x"] * 500
    world.engine.token_delay_s = 0.005
    session_id = await world.session()
    stream = await world.ask(session_id)
    async for _ in stream.events():
        break
    await world.until_idle()
    _, turns = await world.sessions.get(OWNER, session_id)
    assert (turns[0].status, turns[0].finish_reason) == ("cancelled", "cancelled")
    assert 0 < len(turns[0].answer) < 60
    assert turns[0].answer == stream.text
    world.engine.reply = ["ok"]
    assert (await world.answer(session_id))["answer"] == "ok"


async def test_reader_that_returns_in_time_gets_the_rest(world: World) -> None:
    world.engine.reply = [f"{n} " for n in range(40)]
    world.engine.token_delay_s = 0.003
    session_id = await world.session()
    stream = await world.ask(session_id)
    got: list[StreamEvent] = []
    while not got or got[-1].name != "done":
        source = await world.answers.stream(OWNER, session_id, stream.answer_id)
        async for event in source.events(got[-1].id if got else 0):
            got.append(event)
            if len(got) % 7 == 0:
                break
        await asyncio.sleep(0.005)
    assert "".join(e.data["text"] for e in got if e.name == "token") == "".join(world.engine.reply)
    assert got[-1].data["finish_reason"] == "stop"


async def test_cancelled_while_rebuilding(world: World) -> None:
    world.engine.chunk_delay_s = 0.2
    session_id = await world.session()
    world.engine.miss_next()
    stream = await world.ask(session_id)
    waiting = asyncio.create_task(stream.wait_closed())
    await asyncio.sleep(0.02)
    waiting.cancel()
    async with asyncio.timeout(0.3):
        await world.until_idle()
    assert stream.last_event is not None
    assert stream.last_event.data["finish_reason"] == "cancelled"
    assert world.engine.answered == []


async def test_restart_fails_what_was_running(world: World) -> None:
    world.engine.token_delay_s = 10
    session_id = await world.session()
    stream = await world.ask(session_id)
    later = world.build()
    await later.recover()
    _, turns = await later.sessions.get(OWNER, session_id)
    assert (turns[0].status, turns[0].error_code) == ("failed", "interrupted")
    events = [e async for e in (await later.answers.stream(OWNER, session_id, stream.answer_id)).events()]
    assert [e.name for e in events] == ["error"]


async def test_close_stores_what_there_is_and_refuses_more(world: World) -> None:
    world.engine.reply = ["a"] * 1000
    world.engine.token_delay_s = 0.005
    session_id = await world.session()
    stream = await world.ask(session_id)
    await asyncio.sleep(0.03)
    await world.answers.close()
    assert stream.closed
    assert (await world.sessions.get(OWNER, session_id))[1][0].status == "cancelled"
    with pytest.raises(Unavailable):
        await world.ask(session_id)


async def test_full_disk_when_a_question_begins(world: World) -> None:
    sessions = [await world.session() for _ in range(10)]
    await fill_disk(world)
    refused = None
    for session_id in sessions:  # the first ones may still fit into half-empty pages of the file
        try:
            await (await world.ask(session_id, "q" * 1300, stop=("s" * 200,) * 8)).wait_closed()
        except StorageFull:
            refused = session_id
            break
    await empty_disk(world)
    assert refused is not None
    assert (await world.sessions.get(OWNER, refused))[1] == []
    assert world.conversations.admission.admitted == 0
    assert (await world.answer(refused))["answer"]


async def test_full_disk_when_an_answer_ends(world: World) -> None:
    world.engine.token_delay_s = 0.02
    session_id = await world.session()
    await world.answer(session_id, "One?")
    world.engine.reply = ["long " * 20_000]
    stream = await world.ask(session_id, "Two?")
    await fill_disk(world)
    event = await stream.wait_closed()
    assert isinstance(event.data, StorageFull)
    assert world.files.removed == [stream.answer_id]
    await empty_disk(world)
    world.engine.reply = ["ok"]
    await world.answer(session_id, "Three?")
    assert len(world.engine.answered[-1].turns) == 1
    _, turns = await world.sessions.get(OWNER, session_id)
    assert [turn.status for turn in turns] == ["done", "failed", "done"]
    assert turns[1].answer == ""


async def fill_disk(world: World) -> None:
    """Every connection of the pool refuses to let the database file grow, and its free pages are used up."""
    await pragma(world, "max_page_count=1")
    columns, values = "document_id, number, text, token_start, token_end", "hex(zeroblob(1700)), 0, 0"
    filler = sql(f"INSERT INTO pages ({columns}) SELECT 'doc_2', max(number) + 1, {values} FROM pages")
    async with world.database.engine.connect() as connection:
        with suppress(OperationalError):
            for _ in range(1000):
                await connection.execute(filler)
                await connection.commit()


async def empty_disk(world: World) -> None:
    await pragma(world, "max_page_count=1000000")


async def pragma(world: World, setting: str) -> None:
    async with world.database.engine.connect() as one, world.database.engine.connect() as two:
        for connection in (one, two):
            await connection.execute(sql(f"PRAGMA {setting}"))


async def test_deleting_a_session_ends_its_answer_and_spares_shared_turns(world: World) -> None:
    session_id = await world.session()
    first = await world.answer(session_id, "One?")
    fork, _ = await world.sessions.fork(OWNER, session_id)
    second = await world.answer(session_id, "Two?")
    world.engine.reply = ["x"] * 500
    world.engine.token_delay_s = 0.005
    running = await world.ask(session_id, "Three?")
    await world.sessions.delete(OWNER, session_id)
    assert running.closed
    assert first["id"] not in world.files.removed
    assert second["id"] in world.files.removed
    with pytest.raises(NotFound):
        await world.sessions.get(OWNER, session_id)
    await world.sessions.delete(OWNER, fork.id)
    assert first["id"] in world.files.removed


async def test_document_removed_while_answering(world: World) -> None:
    world.engine.reply = ["x"] * 500
    world.engine.token_delay_s = 0.005
    session_id = await world.session()
    stream = await world.ask(session_id)
    async with world.database.writing() as uow:
        await uow.documents.remove("doc_1")
    await world.conversations.document_removed("doc_1", [session_id])
    assert stream.last_event is not None
    assert isinstance(stream.last_event.data, NotFound)
    with pytest.raises(NotFound):
        await world.ask(session_id)


async def test_fork_shares_kv_and_goes_its_own_way(world: World) -> None:
    session_id = await world.session()
    first = await world.answer(session_id, "One?")
    await world.answer(session_id, "Two?")
    fork, turns = await world.sessions.fork(OWNER, session_id, after_turn=first["id"], title="Side")
    assert (fork.forked_from, fork.title, len(turns)) == (session_id, "Side", 1)
    await world.answer(fork.id, "Other?")
    assert [turn.kv_id for turn in world.engine.answered[-1].turns] == [first["id"]]
    assert len((await world.sessions.get(OWNER, session_id))[1]) == 2
    _, turns = await world.sessions.fork(OWNER, session_id)
    assert [turn.question for turn in turns] == ["One?", "Two?"]
    assert len({turn.id for turn in turns} | {first["id"]}) == 3


async def test_fork_refusals(world: World) -> None:
    session_id = await world.session()
    world.engine.fail_next("answer", Failed("internal", "x"))
    stream = await world.ask(session_id)
    await stream.wait_closed()
    with pytest.raises(NotFound):
        await world.sessions.fork(OWNER, session_id, after_turn="ans_no")
    with pytest.raises(Conflict):
        await world.sessions.fork(OWNER, session_id, after_turn=stream.answer_id)
    with pytest.raises(NotFound):
        await world.sessions.fork(OWNER, "ses_no")


async def test_session_of_another_model_cannot_go_on(world: World) -> None:
    session_id = await world.session()
    await world.answer(session_id)
    world.conversations = world.build(prompt_digest="p2")
    with pytest.raises(Conflict) as refused:
        await world.ask(session_id)
    assert refused.value.code == "model_changed"


async def test_sessions_are_listed_newest_first_in_pages(world: World) -> None:
    ids = [await world.session() for _ in range(5)]
    seen: list[str] = []
    after = None
    while True:
        page = await world.sessions.page(OWNER, limit=2, after=after)
        seen += [row.id for row in page.sessions]
        if not page.has_more:
            break
        after = seen[-1]
    assert seen == ids[::-1]
    assert (await world.sessions.page("someone")).sessions == []


async def test_orphaned_turns_are_swept(world: World) -> None:
    kept = await world.answer(await world.session())
    await world.conversations.recover(lambda: [(OWNER, kept["id"]), (OWNER, "ans_orphan")])
    assert world.files.removed == ["ans_orphan"]


async def test_nothing_is_left_behind_by_many_readers_that_leave(world: World) -> None:
    world.conversations = world.build(queue_limit=32, grace_s=0.0)
    world.engine.reply = ["x"] * 50
    world.engine.token_delay_s = 0.001
    sessions = [await world.session() for _ in range(12)]

    async def ask_and_leave(session_id: str) -> None:
        stream = await world.ask(session_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.wait_closed()

    for _ in range(3):
        await asyncio.gather(*(ask_and_leave(session_id) for session_id in sessions))
        await world.until_idle()
    assert world.conversations.admission.admitted == 0
    assert (await world.engine.stats()).running == 0
