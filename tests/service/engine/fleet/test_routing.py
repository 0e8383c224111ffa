"""Which worker gets which request."""

import asyncio
from dataclasses import asdict

import msgspec
import pytest

from service.engine.fake import FAKE_FINGERPRINT, FakeEngine
from service.engine.fleet.records import WorkerState
from service.engine.fleet.roster import Roster, Wish, Worker, merged_info, place_answer, place_build
from service.engine.messages import AnswerDone, DocumentRef, EngineInfo, EngineStats
from tests.service.engine.fleet.conftest import DOC, ask, build, every, until

OTHER = DocumentRef("own", "other")


def info(**more) -> EngineInfo:
    fields = {"max_context": 8192, "bytes_per_token": 64, "block_tokens": 256, "max_batch": 4, "pid": 1}
    named = {"engine": "fake", "model_name": "fake", "compute_dtype": "none", "kv_type": "k8v8"}
    return EngineInfo(**named | {"fingerprint": asdict(FAKE_FINGERPRINT), "fingerprint_digest": "f"} | fields | more)


def worker(id: str, *documents: DocumentRef, active: int = 0, shares: bool = True, **more) -> Worker:
    state = {"ready": True, "draining": False, "free_nbytes": 0, "heartbeat_s": 1.0} | more
    stats = EngineStats(*[0] * 11, documents=list(documents))
    return Worker.of(
        WorkerState(id, "e", state.pop("info", info()), active=active, shares=shares, stats=stats, **state)
    )


def placed(workers: list[Worker], documents=(DOC,), **wish) -> str | None:
    found = place_answer(workers, Wish(list(documents), **wish))
    return found and found.id


def test_the_least_loaded_gets_what_nobody_has():
    assert placed([worker("a", active=2), worker("b", active=1), worker("c", active=3)]) == "b"
    assert placed([]) is None


def test_the_one_with_the_document_in_memory_gets_the_question():
    assert placed([worker("a"), worker("b", DOC, active=3), worker("c", OTHER)]) == "b"
    assert placed([worker("a", DOC, active=2), worker("b", DOC, active=1)]) == "b"


def test_then_one_that_has_it_on_its_disk():
    assert placed([worker("a"), worker("b", active=2)], homes=("b",)) == "b"
    assert placed([worker("a", DOC, active=1), worker("b")], homes=("b",)) == "a"


def test_a_session_stays_where_it_is():
    assert placed([worker("a", DOC), worker("b", DOC, active=2)], session="b") == "b"
    assert placed([worker("a", DOC), worker("b", DOC, active=2)], session="gone") == "a"


def test_a_session_does_not_stay_where_its_document_cannot_come():
    assert placed([worker("a", DOC, shares=False), worker("b", shares=False)], session="b") == "a"


def test_a_document_in_demand_goes_to_a_second_worker():
    busy = worker("a", DOC, active=5)
    assert placed([busy, worker("b", active=1)]) == "b"
    assert placed([busy, worker("b", active=1)], session="a") == "b"
    assert placed([busy, worker("b", active=4)]) == "a"


def test_but_not_while_a_place_is_free_soon():
    assert placed([worker("a", DOC, active=4), worker("b")]) == "a"
    assert placed([worker("a", DOC, active=1, info=info(max_batch=1)), worker("b")]) == "b"


def test_but_not_to_one_that_would_have_to_read_it_again():
    assert placed([worker("a", DOC, active=9, shares=False), worker("b", shares=False)]) == "a"


def test_who_has_refused_is_not_asked_again():
    assert placed([worker("a", DOC), worker("b")], tried=frozenset("a")) == "b"


def test_a_session_over_several_documents_goes_where_all_are():
    assert placed([worker("a", DOC, OTHER, active=2), worker("b", DOC)], (DOC, OTHER)) == "a"


def test_a_build_goes_where_it_began_else_to_the_least_loaded():
    workers = [worker("a", active=1), worker("b", active=3)]
    assert place_build(workers, Wish([DOC])).id == "a"
    assert place_build(workers, Wish([DOC], homes=("gone", "b", "a"))).id == "b"
    assert place_build([], Wish([DOC])) is None


def states(*workers: Worker) -> list[WorkerState]:
    return [each.state for each in workers]


def test_the_fingerprint_that_most_have_is_served_and_kept_when_it_is_even():
    old, new = info(fingerprint_digest="old"), info(fingerprint_digest="new")
    roster = Roster()
    roster.update(states(worker("a", info=old), worker("b", info=old), worker("c", info=new)), 0)
    assert [w.id for w in roster.serving] == ["a", "b"]
    assert not roster.update(states(worker("a", info=old), worker("c", info=new)), 0)
    assert [w.id for w in roster.serving] == ["a"]
    assert roster.update(states(worker("c", info=new)), 0)
    assert [w.id for w in roster.serving] == ["c"]
    assert len(roster.all) == 1


def test_two_processes_serve_one_fingerprint_when_it_is_even():
    old, new = info(fingerprint_digest="old"), info(fingerprint_digest="new")
    both = states(worker("a", info=old), worker("b", info=new))
    began_later, before = Roster(), Roster()
    before.update(states(worker("a", info=old)), 0)
    for roster in (before, began_later):
        roster.update(both, 0, served="old")
        assert [w.id for w in roster.serving] == ["a"]
    assert before.update(both, 0, served="new")
    assert not before.update(both, 0, served="one that nobody has")
    assert [w.id for w in before.serving] == ["b"]


def test_a_worker_that_does_not_understand_the_tokens_is_left_alone():
    """However many there are: an answer to another tokenizer's tokens is about something else."""
    ours, other = info(fingerprint_digest="z"), info(fingerprint_digest="a", model_name="other")
    roster = Roster(lambda info: info.model_name != "other")
    roster.update(states(worker("a", info=other), worker("b", info=other)), 0, served="a")
    assert (roster.serving, roster.info) == ([], None)
    roster.update(states(worker("a", info=other), worker("b", info=other), worker("c", info=ours)), 0, served="a")
    assert [w.id for w in roster.serving] == ["c"]


def test_a_worker_that_drains_or_has_no_engine_gets_nothing():
    roster = Roster()
    roster.update(states(worker("a", draining=True), worker("b", ready=False), worker("c")), 0)
    assert [w.id for w in roster.serving] == ["c"]


def test_the_fleet_can_do_what_all_can():
    small = info(max_context=100, resident_tokens=50, tail_tokens=0, has_slots=False, max_batch=2)
    merged = merged_info([info(resident_tokens=0, tail_tokens=9), small])
    assert (merged.max_context, merged.resident_tokens, merged.tail_tokens) == (100, 50, 9)
    assert (merged.max_batch, merged.has_slots) == (6, False)


def follow(roster: Roster, worker_id: str, n: int) -> None:
    roster.follow((worker_id, "e"), n)


def loads(roster: Roster) -> list[int]:
    return [w.load for w in roster.serving]


def test_requests_that_are_followed_count_though_a_worker_has_not_said_so():
    roster = Roster()
    roster.update(states(worker("a"), worker("b", active=1)), 0)
    follow(roster, "a", 2)
    assert placed(roster.serving) == "b"
    follow(roster, "a", -2)
    assert placed(roster.serving) == "a"


def test_requests_that_are_over_do_not_count_though_a_worker_has_not_said_so():
    roster = Roster()
    roster.update(states(worker("a"), worker("b")), 0)
    follow(roster, "a", 4)
    follow(roster, "a", -1)
    roster.update(states(worker("a", active=4), worker("b")), 1)
    assert loads(roster) == [3, 0]
    follow(roster, "a", -3)
    assert loads(roster) == [0, 0]


def test_requests_of_other_processes_count_as_the_worker_said():
    roster = Roster()
    follow(roster, "a", 2)
    roster.update(states(worker("a", active=5), worker("b", active=1)), 0)
    assert loads(roster) == [5, 1]
    follow(roster, "a", -2)
    assert loads(roster) == [3, 1]


@pytest.mark.anyio
async def test_two_workers_share_documents_and_keep_sessions(fleet):
    engines = [await fleet.worker(name, FakeEngine()) for name in ("w1", "w2")]
    client = await fleet.client()
    documents = [DocumentRef("own", f"doc{n}") for n in range(8)]
    await asyncio.gather(*(build(client, document, f"b{document.document_id}") for document in documents))
    assert sorted(len(engine.built) for engine in engines) == [4, 4]
    for n in range(3):
        for document in documents:
            name = f"{n}{document.document_id}"
            events = await every(client.answer(ask(name, document, session=document.document_id)))
            assert isinstance(events[-1], AnswerDone)
    for engine in engines:
        asked = {request.document for request in engine.answered}
        assert asked == {request.document for request in engine.built}
    assert sum(len(engine.answered) for engine in engines) == 24


@pytest.mark.anyio
async def test_a_document_that_is_only_on_anothers_disk_is_answered_there(fleet):
    here, away = await fleet.worker("w1", FakeEngine()), await fleet.worker("w2", FakeEngine())
    client = await fleet.client()
    await build(client)
    owner, stranger = (here, away) if here.snapshots else (away, here)
    owner.resident.clear()
    stranger.resident.add(DOC)  # it says so, and will miss it
    await until(lambda: [w.documents for w in client.workers].count(frozenset([DOC])) == 1)
    events = await every(client.answer(ask()))
    assert isinstance(events[-1], AnswerDone)
    assert len(owner.answered) == 1


@pytest.mark.anyio
async def test_a_build_that_another_process_began_goes_to_the_same_worker(fleet):
    slow = FakeEngine(chunk_delay_s=0.3)
    await fleet.worker("w1", slow)
    first = await fleet.client()
    task = asyncio.create_task(build(first))
    await until(lambda: slow.built)
    other = await fleet.worker("w2", FakeEngine())
    second = await fleet.client()
    await build(second)
    await task
    assert not other.built
    assert len(slow.built) == 2
    assert msgspec.structs.asdict(slow.built[0])["request_id"] != slow.built[1].request_id
