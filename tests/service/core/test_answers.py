"""Questions and their answers: what is asked of the engine, what is kept, what is refused."""

import asyncio
from typing import Any

import pytest

from service.core.sampling import Question
from service.engine.fake import FakeEngine
from service.errors import Busy, Conflict, Invalid, NotFound, TooLong

pytestmark = pytest.mark.anyio


async def test_answer_has_every_field_of_the_contract(world) -> None:
    world.engine.reply = ["The fee ", "is 1,275 ", "pounds."]
    answer = await world.answer(await world.session(), "How much is the fee?")
    prompt = world.prompt.question("How much is the fee?")
    assert answer["answer"] == "The fee is 1,275 pounds."
    assert answer["finish_reason"] == "stop"
    assert answer["citations"] == [
        {
            "document_id": "doc_1", "page": 1, "quote": "The fee is 1,275 pounds.", "score": 1.0,
            "answer_start": 0, "answer_end": 24, "page_start": 40, "page_end": 64, "attention": None, "label": None,
        }
    ]  # fmt: skip
    assert answer["unsupported"] == []
    assert answer["provenance"] == [{"document_id": "doc_1", "first_page": 1, "last_page": 1, "mode": "verbatim"}]
    assert answer["notice"] is None
    assert answer["usage"] == {
        "document_tokens": 600, "reused_tokens": 600, "prefilled_tokens": len(prompt), "completion_tokens": 3,
        "first_pass_tokens": 0,
        "second_pass_tokens": 0,
    }  # fmt: skip
    assert answer["cache"] == {
        "source": "disk", "restored_tokens": 600, "restore_ms": 1.0, "miss_reason": None,
    }  # fmt: skip
    assert set(answer["timings"]) == {
        "queue_ms", "restore_ms", "ttft_ms", "total_ms", "decode_tokens_per_s", "fetch_ms",
        "steps", "drafted_tokens", "accepted_tokens",
    }  # fmt: skip
    assert answer["timings"]["total_ms"] >= answer["timings"]["ttft_ms"] > 0


async def test_follow_up_builds_on_stored_tokens_and_pending_ids(world) -> None:
    session_id = await world.session()
    first = await world.answer(session_id, "One?")
    second = await world.answer(session_id, "Two?")
    asked = world.engine.answered
    assert asked[0].turns == []
    assert [turn.kv_id for turn in asked[1].turns] == [first["id"]]
    assert asked[1].turns[0].token_ids == world.engine.stored_turns[first["id"]]
    pending = [1000 + len(world.engine.reply) - 1]
    assert asked[1].prompt_ids == [*pending, world.prompt.end, 1, *b"Two?", 2]
    assert second["usage"]["reused_tokens"] == 600 + len(asked[1].turns[0].token_ids)
    assert second["usage"]["prefilled_tokens"] == len(asked[1].prompt_ids)


async def test_the_engine_is_told_which_documents_are_pinned(world) -> None:
    session_id = await world.session()
    await world.answer(session_id, "One?")
    async with world.database.writing() as uow:
        await uow.documents.change("doc_1", pinned=True)
    await world.answer(session_id, "Two?")
    assert [request.pinned for request in world.engine.answered] == [False, True]


async def test_follow_up_after_a_restart_is_the_same_request(world) -> None:
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
        ({"question": "x" * 5000}, TooLong, "the question has 5,002"),
        ({"question": "x" * 1420, "max_tokens": 60}, TooLong, "26 are left"),
    ],
)
async def test_refusals_keep_nothing(world, options: dict[str, Any], error: type[Exception], words: str) -> None:
    session_id = await world.session()
    with pytest.raises(error, match=words):
        await world.answer(session_id, **{"question": "Who?", **options})
    assert (await world.sessions.get(world.owner, session_id))[1] == []
    assert (await world.answer(session_id))["finish_reason"] == "stop"


async def test_answers_are_cut_to_the_room_that_is_left(world) -> None:
    await world.answer(await world.session(), "x" * 1420)
    assert world.engine.answered[0].sampling.max_tokens == 2048 - 600 - 1422


async def test_a_session_that_holds_as_much_as_the_engine_can(world) -> None:
    world.engine = FakeEngine(max_context=100_000, tail_tokens=300)
    world.engine.snapshots[world.document] = (world.token_digest, world.n_tokens, None)
    world.conversations = world.build()
    session_id = await world.session()
    await world.answer(session_id, "x" * 200)
    with pytest.raises(
        TooLong, match=r"holds 300 tokens beside its document .* room for 99,400\); 1 earlier turn takes 205"
    ):
        await world.ask(session_id, "y" * 100)


async def test_unknown_and_foreign_sessions(world) -> None:
    session_id = await world.session()
    for owner, id in ((world.owner, "ses_no"), ("someone", session_id)):
        with pytest.raises(NotFound):
            await world.answers.ask(owner, id, Question("Who?"))
        with pytest.raises(NotFound):
            await world.answers.stream(owner, id, "ans_no")


async def test_second_question_at_once_is_refused(world) -> None:
    world.engine.token_delay_s = 0.3
    session_id = await world.session()
    first = await world.ask(session_id)
    with pytest.raises(Conflict) as refused:
        await world.ask(session_id)
    assert refused.value.code == "session_busy"
    await first.wait_closed()
    assert (await world.answer(session_id))["answer"]


async def test_done_means_that_the_next_question_may_come(world) -> None:
    session_id = await world.session()
    for _ in range(5):
        async for event in (await world.ask(session_id)).events():
            last = event
        assert last.name == "done"


async def test_fifty_questions_on_a_queue_of_eight(world) -> None:
    world.engine.token_delay_s = 0.1
    sessions = [await world.session() for _ in range(50)]
    results = await asyncio.gather(*(world.answer(s) for s in sessions), return_exceptions=True)
    refused = [result for result in results if isinstance(result, Busy)]
    done = [result for result in results if isinstance(result, dict)]
    assert len(done) == 8
    assert len(refused) == 42
    assert all(error.retry_after_s >= 1 for error in refused)
    assert world.conversations.admission.admitted == 0


async def test_session_of_another_model_cannot_go_on(world) -> None:
    session_id = await world.session()
    await world.answer(session_id)
    world.conversations = world.build(prompt_digest="p2")
    with pytest.raises(Conflict) as refused:
        await world.ask(session_id)
    assert refused.value.code == "model_changed"
