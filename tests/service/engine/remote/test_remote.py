"""A real engine process: killed, restarted, drained."""

import asyncio
import os
import signal
import stat
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from msgspec.structs import replace

from service.engine.digests import digest_of
from service.engine.factory import EngineConfig
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildProgress,
    BuildRequest,
    DocumentRef,
    Failed,
    Retention,
    Sampling,
    TurnRef,
)
from service.engine.protocol import EngineLost
from service.engine.remote import wire
from service.engine.remote.child import EngineProcess
from service.engine.remote.client import RemoteEngine
from service.engine.remote.server import Connection
from service.engine.remote.supervisor import EngineSupervisor

pytestmark = pytest.mark.anyio
DOC = DocumentRef("own", "doc")
TOKENS = [i % 250 for i in range(5000)]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def start(tmp_path):
    """Start supervised fake engines on one store; all are closed at the end."""
    started: list[EngineSupervisor] = []

    async def make(**more) -> EngineSupervisor:
        more.setdefault("store_dir", str(tmp_path / "store"))
        supervisor = EngineSupervisor(EngineConfig(engine="fake", drain_s=4.0, **more))
        started.append(supervisor)
        await supervisor.start()
        return supervisor

    yield make
    for supervisor in started:
        await supervisor.close()


def ask(name="a", max_tokens=100, **more) -> AnswerRequest:
    turns, prompt = more.pop("turns", []), more.pop("prompt", [1, 2])
    return AnswerRequest(
        name, "s", DOC, digest_of(TOKENS), len(TOKENS), turns, prompt, Sampling(max_tokens), f"kv-{name}"
    )


async def every(events):
    return [event async for event in events]


async def build(engine, tokens=TOKENS):
    return await every(engine.build(BuildRequest("b", DOC, tokens)))


async def until(condition) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def shard_bytes(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(root.glob("store/snapshots/own/documents/doc/*/shard-*"))]


async def test_build_answer_and_follow_up_over_a_private_socket(start):
    engine = await start()
    assert engine.info.pid != os.getpid()
    assert isinstance((await build(engine))[-1], BuildDone)
    events = await every(engine.answer(ask()))
    assert isinstance(events[0], AnswerStarted)
    assert "".join(e.text for e in events if isinstance(e, AnswerText)).startswith("This is the fake")
    done = events[-1]
    assert isinstance(done, AnswerDone)
    turns = [TurnRef("kv-a", done.token_ids)]
    follow_up = (await every(engine.answer(ask("f", turns=turns, prompt=[*done.pending_ids, 7]))))[0]
    assert isinstance(follow_up, AnswerStarted)
    assert follow_up.reused_tokens == 5000 + len(done.token_ids)
    assert await engine.check() > 0
    heard = engine._engine.n_heard
    engine._engine.ping()
    await until(lambda: engine._engine.n_heard == heard + 1)
    assert (await engine.stats()).decoded_tokens_total > 40
    await engine.release_session("s")
    assert (await engine.release(DOC)).objects == 1
    directory = engine._process._directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "s").stat().st_mode) == 0o600
    await engine.close()
    assert not directory.exists()


async def test_a_windowed_document_over_the_socket(start):
    kept, tokens = Retention(256, 32, 256, segment_tokens=1024, fetch_tokens=96), [*TOKENS]
    tokens[2222] = 251
    engine = await start(fake_script=[65, 256])
    assert (engine.info.n_index_heads, engine.info.sink_multiple) == (1, 1)
    events = await every(engine.build(BuildRequest("b", DOC, tokens, kept)))
    assert {"prefilling", "compacting", "persisting"} == {e.stage for e in events if isinstance(e, BuildProgress)}
    assert events[-1].resident_tokens == 256 + 32 + 256
    question = AnswerRequest("q", "s", DOC, digest_of(tokens), 5000, [], [251, 2], Sampling(5), "kv-q", retention=kept)
    first = await every(engine.answer(question))
    assert any(span.first <= 2222 < span.first + span.n_tokens for span in first[0].spans)
    turns = [TurnRef("kv-q", first[-1].token_ids, first[0].spans)]
    later = await every(engine.answer(replace(question, request_id="r", turns=turns, prompt_ids=[256, 9], kv_id="")))
    assert later[0].reused_tokens == 5000 + len(turns[0].token_ids)
    assert (await engine.stats()).index_documents == 1


async def test_scripted_chinese_and_emoji_arrive_whole_also_when_cut(start):
    text = "答案：合同于三月三日到期🙂👩‍👩‍👧 e\u0301é नमस्ते"
    engine = await start(fake_script=[*text.encode(), 256])
    await build(engine)
    events = await every(engine.answer(ask(max_tokens=500)))
    pieces = [e.text for e in events if isinstance(e, AnswerText)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    for cut in range(1, len(text.encode()), 7):
        events = await every(engine.answer(ask(f"c{cut}", max_tokens=cut)))
        joined = "".join(e.text for e in events if isinstance(e, AnswerText))
        assert joined == text.encode()[:cut].decode(errors="ignore")


async def test_kill_in_mid_answer_is_retryable_and_the_next_question_is_answered(start):
    engine = await start(fake_step_s=0.02)
    await build(engine)
    before = (await every(engine.answer(ask("first", max_tokens=5))))[-1]
    events = engine.answer(ask())
    assert isinstance(await anext(events), AnswerStarted)
    os.kill(engine.info.pid, signal.SIGKILL)
    lost = (await every(events))[-1]
    assert isinstance(lost, Failed)
    assert (lost.code, lost.retryable) == ("engine_lost", True)
    assert await engine.wait_alive(90)
    again = await every(engine.answer(ask("first", max_tokens=5)))
    assert isinstance(again[0], AnswerStarted)
    assert (again[0].source, again[0].restored_tokens) == ("disk", 5000)
    assert isinstance(again[-1], AnswerDone)
    assert isinstance(before, AnswerDone)
    assert again[-1].token_ids == before.token_ids
    assert engine.n_restarts == 1


async def test_kill_in_mid_build_resumes_from_the_journal_with_equal_bytes(start, tmp_path):
    engine = await start(store_dir=str(tmp_path / "whole" / "store"))
    await build(engine)
    await engine.close()
    engine = await start(fake_layer_s=0.05)
    durable, last = 0, None
    async for event in engine.build(BuildRequest("b", DOC, TOKENS)):
        if isinstance(event, BuildProgress):
            durable = max(durable, event.done)
        if durable >= 2500 and engine.alive:
            os.kill(engine.info.pid, signal.SIGKILL)
        last = event
    assert isinstance(last, Failed)
    assert last.retryable
    assert await engine.wait_alive(90)
    done = (await build(engine))[-1]
    assert isinstance(done, BuildDone)
    assert done.resumed_tokens >= durable
    assert done.resumed_tokens + done.prefilled_tokens == 5000
    assert shard_bytes(tmp_path) == shard_bytes(tmp_path / "whole")


@pytest.mark.alone
async def test_sigterm_lets_answers_end_with_what_they_have(start):
    engine = await start(fake_step_s=0.02, fake_script=[65] * 2000)
    await build(engine)
    events, seen = engine.answer(ask(max_tokens=1500)), []
    seen += [await anext(events), await anext(events)]
    started = time.monotonic()
    closing = asyncio.create_task(engine.close())
    seen += await every(events)
    await closing
    assert time.monotonic() - started < 10
    assert isinstance(seen[-1], AnswerDone)
    assert (seen[-1].finish_reason, seen[-1].kv_stored) == ("cancelled", True)
    assert not engine.alive


async def test_a_configuration_that_cannot_work_is_given_up_with_the_reason(tmp_path):
    supervisor = EngineSupervisor(EngineConfig(engine="abacus", store_dir=str(tmp_path)))
    with pytest.raises(EngineLost, match="no engine 'abacus'"):
        await supervisor.start()


async def test_a_model_that_cannot_be_used_is_told_in_a_sentence(tmp_path):
    supervisor = EngineSupervisor(EngineConfig(engine="fake", model_dir=str(tmp_path), store_dir=str(tmp_path / "s")))
    with pytest.raises(EngineLost, match="cannot start") as lost:
        await supervisor.start()
    assert "Traceback" not in str(lost.value)


async def test_calls_fail_cleanly_while_there_is_no_engine_and_one_that_served_is_never_given_up(start):
    engine = await start()
    engine._max_quick_failures = 1
    for _ in range(2):
        os.kill(engine.info.pid, signal.SIGKILL)
        await until(lambda: not engine.alive)
        lost = (await every(engine.answer(ask())))[-1]
        assert isinstance(lost, Failed)
        assert lost.code == "engine_lost"
        with pytest.raises(EngineLost):
            await engine.check()
        assert (await engine.release(DOC)).objects == 0
        await engine.cancel("a")
        assert await engine.wait_alive(90)
    assert (engine.failure, engine.n_restarts) == (None, 2)


async def test_an_engine_that_never_serves_is_given_up_with_the_reason(tmp_path, monkeypatch):
    async def dies(self):
        return "the engine ended with status -9"

    monkeypatch.setattr(EngineSupervisor, "_run_once", dies)
    supervisor = EngineSupervisor(EngineConfig(engine="fake", store_dir=str(tmp_path)), max_quick_failures=2)
    with pytest.raises(EngineLost, match="-9"):
        await supervisor.start()


async def test_an_engine_that_served_is_started_again_also_when_it_refuses(start, monkeypatch):
    """Memory that others took for a while, for example, is no reason to need a person."""
    engine = await start()
    refused = []

    async def refusing(config):
        if engine.n_restarts == 1:
            refused.append(await real(replace(config, engine="none")))
            return refused[0]
        return await real(config)

    real = EngineProcess.start
    monkeypatch.setattr(EngineProcess, "start", refusing)
    os.kill(engine.info.pid, signal.SIGKILL)
    await until(lambda: engine.n_restarts == 2)
    assert refused[0].refused_configuration
    assert await engine.wait_alive(90)
    assert engine.failure is None


async def test_the_process_ends_with_its_parent_whose_business_sigint_is(start):
    engine = await start()
    pid = engine.info.pid
    os.kill(pid, signal.SIGINT)
    assert await engine.check() > 0
    engine._closing.set()
    engine._process._process.stdin.close()  # what the kernel does when the parent is killed
    # Its connection ends first, and the process is gone some time after.
    await until(lambda: not engine.alive and not psutil.pid_exists(pid))


async def test_closing_an_iterator_stops_its_request(start):
    engine = await start(fake_step_s=0.05, fake_script=[65] * 2000)
    await build(engine)
    events = engine.answer(ask(max_tokens=1500))
    await anext(events)
    await events.aclose()
    for _ in range(3000):
        if not (await engine.stats()).running:
            break
        await asyncio.sleep(0.02)
    stats = await engine.stats()
    assert (stats.running, stats.tail_slots_used) == (0, 0)
    assert stats.steps_total < 200


async def test_another_protocol_version_and_garbage_are_refused(tmp_path):
    async def greet(_reader, writer: asyncio.StreamWriter) -> None:
        writer.write(greetings.pop())
        await writer.drain()
        writer.close()

    greetings = [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00hi", b""]
    server = await asyncio.start_unix_server(greet, tmp_path / "s")
    async with server:
        while greetings:
            with pytest.raises(EngineLost):
                await RemoteEngine.connect(str(tmp_path / "s"))
    with pytest.raises(EngineLost, match="cannot be reached"):
        await RemoteEngine.connect(str(tmp_path / "none"))


class Quiet:
    """An engine that answers every so many pings."""

    def __init__(self, every: int) -> None:
        self.n_heard = self.n_pings = 0
        self._every = every

    def ping(self) -> None:
        self.n_pings += 1
        self.n_heard += self._every > 0 and self.n_pings % self._every == 0


class Hanging:
    """A process that ends when it is killed."""

    pid = 1

    def __init__(self) -> None:
        self.killed = asyncio.Event()
        self.kill = self.killed.set

    async def wait(self) -> int:
        await self.killed.wait()
        return -9


@pytest.mark.parametrize(("answers", "after_s", "dies"), [(0, 0.1, True), (9, 0.05, False), (0, 0.0, False)])
async def test_only_an_engine_that_says_nothing_at_all_is_killed(tmp_path, answers, after_s, dies):
    config = EngineConfig(engine="fake", store_dir=str(tmp_path))
    supervisor, process, engine = EngineSupervisor(config, silent_s=after_s), Hanging(), Quiet(answers)
    ended = asyncio.create_task(supervisor._ended(process, engine))
    if dies:
        assert await ended == "the engine said nothing for 0.1 s"
        assert process.killed.is_set()
        return
    await until(lambda: not after_s or engine.n_pings > 40)
    await asyncio.sleep(0.1)
    assert not process.killed.is_set()
    process.kill()
    assert await ended == "the engine ended with status -9"


def test_a_frame_has_its_length_in_front_and_a_limit():
    data = wire.frame(wire.Stats(3))
    assert int.from_bytes(data[:4], "little") == len(data) - 4
    assert wire.to_server.decode(data[4:]) == wire.Stats(3)
    with pytest.raises(wire.FrameRefused):
        wire.frame(wire.Cancel("x" * (wire.MAX_FRAME_NBYTES + 1), closed=False))


async def test_a_message_that_cannot_be_sent_takes_no_other_with_it_and_is_waited_for_by_nobody():
    sent, writer, host = [], Mock(), Mock()
    writer.is_closing.return_value, writer.write = False, sent.append
    connection = Connection(host, writer)
    connection._post(wire.Event(1, AnswerText("\udc80")))
    connection._post(wire.Event(2, Failed("storage", "no file \udc80")))
    connection._post(wire.Event(3, Failed("busy", "another's")))
    connection._post(wire.Reply(4, error="x" * (wire.MAX_FRAME_NBYTES + 1)))
    await asyncio.sleep(0)
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(sent))
    reader.feed_eof()
    got = [message async for message in _messages(reader)]
    assert [(message.call, type(message)) for message in got] == [(2, wire.Event), (3, wire.Event), (4, wire.Reply)]
    assert (got[0].event.code, got[1].event.code) == ("internal", "busy")
    assert "could not be sent" in got[2].error


async def _messages(reader):
    while (message := await wire.read_frame(reader, wire.from_server)) is not None:
        yield message
