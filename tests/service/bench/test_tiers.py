"""Restores and first tokens by tier, and runs that do not come to their end."""

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from cache_store.keys import EntryName
from cache_store.tiers.errors import TierDown
from cache_store.tiers.memory import MemoryTier
from cache_store.tiers.tier import BlobTier
from service.bench import directory
from service.bench.files import SnapshotFiles
from service.bench.measure import TIME_OVER, Bench, Progress, Work
from service.bench.pace import Cost, Deadline, Pace
from service.bench.results import load_run
from service.cli import main
from service.engine import factory, local
from service.engine.factory import EngineConfig
from service.engine.local import LocalEngine
from service.engine.protocol import EngineLost
from tests.service.bench.test_bench import PHYSICS, WORK
from tests.service.engine.host.host_copies import FakeCopies


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def measured(
    store: Path, work: Work = WORK, far: tuple[BlobTier, ...] = (), budget_nbytes: int | None = None, **more: Any
) -> Bench:
    config = EngineConfig(
        store_dir=str(store), engine="fake", fake_script=[65] * 30, max_context=600, fake_step_s=0.002,
        disk_budget_nbytes=budget_nbytes,
    )  # fmt: skip
    engine = await LocalEngine.open(config)
    try:
        bench = Bench(engine, store, PHYSICS, work, far=far, **more)
        await bench.run()
        return bench
    finally:
        await engine.close()


class Down(MemoryTier):
    """Takes copies, and then does not answer."""

    def manifest(self, name: Any) -> bytes | None:
        if self.used():
            raise TierDown("the far tier does not answer")
        return super().manifest(name)


@pytest.mark.anyio
async def test_every_tier_that_is_there_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    tier = MemoryTier("redis")
    bench = await measured(tmp_path, far=(tier,))
    rows = {row.name: row for row in bench.rows}
    assert not bench.left_out
    for source in ("disk", "redis"):
        restore, first = rows[f"restore, {source}, 300 tokens"], rows[f"first token, {source}, 300 tokens"]
        assert restore.nbytes == 300 * 500
        assert restore.gbps == restore.value > 0
        assert restore.bound > 0  # what the tier gives in the same run
        assert first.bound > rows["first token, host, 300 tokens"].bound > 0
        assert first.share == pytest.approx(first.bound / first.value)
    assert list(tier.entries()) == []


@pytest.mark.anyio
async def test_a_tier_that_fails_costs_only_its_own_figures(tmp_path: Path) -> None:
    bench = await measured(tmp_path, far=(Down("object"),))
    names = {row.name for row in bench.rows}
    assert names >= {"restore, disk, 300 tokens", "decode, 300 tokens, 2 users, 2 documents"}
    assert [(part.name, part.why) for part in bench.left_out] == [
        ("first token from object, 300 tokens", "the far tier does not answer")
    ]


@pytest.mark.anyio
async def test_a_document_for_which_there_is_no_room_on_the_disk_costs_only_its_figures(tmp_path: Path) -> None:
    await measured(tmp_path / "first")
    one = sum(path.stat().st_size for path in (tmp_path / "first").rglob("documents/300/**/*") if path.is_file())
    bench = await measured(tmp_path / "second", budget_nbytes=one * 3 // 2)
    names = {row.name for row in bench.rows}
    assert names >= {"prefill, 300 tokens", "decode, 300 tokens, 2 users, 2 documents"}
    assert [part.name for part in bench.left_out] == ["first token from disk, 300 tokens"]
    assert "the document's files are not on the disk" in bench.left_out[0].why


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error"),
        (TimeoutError(110, "Connection timed out"), "[Errno 110] Connection timed out"),
        (OSError(), "OSError"),
    ],
)
async def test_an_error_of_the_system_costs_only_the_figures_of_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, why: str
) -> None:
    def fails(self: SnapshotFiles, name: str) -> float:
        raise error

    monkeypatch.setattr(SnapshotFiles, "read_gbps", fails)
    bench = await measured(tmp_path)
    assert "prefill, 300 tokens" in {row.name for row in bench.rows}
    assert [(part.name, part.why) for part in bench.left_out] == [("first token from disk, 300 tokens", why)]


class Slow(MemoryTier):
    """Takes its time for a copy; `began` is called when the first one comes."""

    def __init__(self, began: Callable[[], object]) -> None:
        super().__init__("redis")
        self._began = began
        self.written = threading.Event()

    def write(self, name: EntryName, manifest: bytes, nbytes: int, shards: Iterable[memoryview]) -> None:
        self._began()
        time.sleep(0.3)
        super().write(name, manifest, nbytes, shards)
        self.written.set()


@pytest.mark.anyio
async def test_no_copy_comes_after_the_copies_were_removed(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    tier = Slow(lambda: loop.call_soon_threadsafe(task.cancel))
    task = asyncio.create_task(measured(tmp_path, far=(tier,)))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(tier.written.wait, 5)
    assert list(tier.entries()) == []


@pytest.mark.anyio
async def test_host_memory_of_a_card_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = factory._fake_parts

    def with_card(config: EngineConfig) -> Any:
        parts = make(config)
        runner: Any = parts.runner
        runner.tier, runner.host_copies = "gpu", FakeCopies(runner, 300)
        return parts

    monkeypatch.setattr(factory, "_fake_parts", with_card)
    rows = {row.name: row for row in (await measured(tmp_path)).rows}
    assert {name for name in rows if name.startswith(("first", "restore"))} == {
        "first token, cold, 300 tokens", "first token, gpu, 300 tokens", "first token, host, 300 tokens",
        "restore, host, 300 tokens", "first token, disk, 300 tokens", "restore, disk, 300 tokens",
    }  # fmt: skip
    assert rows["restore, host, 300 tokens"].value > 0


@pytest.mark.anyio
async def test_when_the_time_is_over_the_rest_is_named(tmp_path: Path) -> None:
    told: list[Progress] = []
    work = Work(contexts=(300, 400), users=(1,), repeats=1, answer_tokens=8, minutes=1e-6)
    bench = await measured(tmp_path, work, tell=told.append)
    assert not bench.rows
    assert [part.name for part in bench.left_out] == [progress.name for progress in told]
    assert bench.left_out[0].why == TIME_OVER
    assert all(part.why == TIME_OVER or "was not read" in part.why for part in bench.left_out)
    assert told[0].parts == len(told) == 8


@pytest.mark.anyio
async def test_what_belongs_to_a_document_that_was_not_read_is_not_tried(tmp_path: Path) -> None:
    bench = await measured(tmp_path, Work(contexts=(300, 1000), users=(1,), repeats=1, answer_tokens=8))
    assert "prefill, 300 tokens" in {row.name for row in bench.rows}
    assert len(bench.left_out) == 4
    assert {part.why for part in bench.left_out} == {"the model's context has room for documents of 568 tokens"}


@pytest.mark.anyio
async def test_a_part_that_fails_takes_only_those_with_it_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = Bench._prefill

    async def fails(self: Bench, context: int) -> Any:
        if context == 300:
            raise EngineLost("the memory is full")
        return await real(self, context)

    monkeypatch.setattr(Bench, "_prefill", fails)
    bench = await measured(tmp_path, Work(contexts=(300, 400), users=(1,), repeats=1, answer_tokens=8))
    assert "restore, disk, 400 tokens" in {row.name for row in bench.rows}
    first, *rest = bench.left_out
    assert first.why == "the memory is full"
    assert {part.why for part in rest} == {"the document of 300 tokens was not read"}


@pytest.mark.anyio
async def test_repeats_end_before_the_time_does() -> None:
    now = [0.0]
    deadline = Deadline(10, lambda: now[0])

    async def sample() -> float:
        now[0] += 4
        return now[0]

    assert await deadline.repeated(5, sample) == [4, 8]
    assert await deadline.repeated(5, sample) == [12], "one is wanted at least"


def test_what_is_left_is_guessed_by_what_was_seen() -> None:
    pace = Pace(token_s=0.01, step_s=0.1)
    parts = [Cost(prefill=100), Cost(steps=10)]
    assert pace.left_s(parts) == pytest.approx(2)
    pace.ended(Cost(prefill=200), 4)
    assert pace.left_s(parts) == pytest.approx(4)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored, and these tests may run there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PREREAD_ENGINE", "fake")
    monkeypatch.setenv("PREREAD_FREE_FLOOR_BYTES", "0")
    monkeypatch.setenv("PREREAD_OBJECT_URL", f"file://{tmp_path}/objects")


@pytest.mark.usefixtures("interruptible", "settings")
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["service.engine.local.open_host", Bench._warm, Bench._prefill])
def test_who_ends_it_before_the_first_figure_gets_the_exit_code_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: signal.Signals, place: Any
) -> None:
    if isinstance(place, str):
        real: Callable[..., Any] = local.open_host

        def ended(config: EngineConfig) -> Any:
            os.kill(os.getpid(), ended_by)
            time.sleep(0.3)  # a model takes long, and what opens it writes into its store
            return real(config)

        monkeypatch.setattr(place, ended)
    else:

        async def ends(*args: Any) -> Any:
            os.kill(os.getpid(), ended_by)
            return await place(*args)

        monkeypatch.setattr(Bench, place.__name__, ends)
    out = tmp_path / "run.json"
    result = CliRunner().invoke(main, ["bench", "--contexts", "300", "--users", "1", "--out", str(out)])
    assert result.exit_code == 130, result.output
    assert "Ended: nothing that was measured is kept." in result.output
    assert not out.exists()
    assert not any((tmp_path / "data").glob(".bench-*"))


@pytest.mark.usefixtures("interruptible", "settings")
def test_who_ends_it_while_the_engine_closes_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = LocalEngine.close

    async def ends(self: LocalEngine) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        await real(self)

    def stays(path: Path) -> None:
        shutil.rmtree(path)
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(LocalEngine, "close", ends)
    monkeypatch.setattr(directory, "shutil", SimpleNamespace(rmtree=stays))
    out = tmp_path / "run.json"
    small = ("--contexts", "300", "--users", "1", "--repeats", "1", "--answer-tokens", "8")
    result = CliRunner().invoke(main, ["bench", *small, "--out", str(out)])
    assert result.exit_code == 130, result.output
    assert "prefill, 300 tokens" in {row.name for row in load_run(out).rows}
    assert "could not be removed: [Errno 39] Directory not empty" in result.output


@pytest.mark.usefixtures("interruptible", "settings")
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_it_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: signal.Signals
) -> None:
    real: Callable[..., Any] = Bench._apart

    async def ended(self: Bench, *args: Any) -> Any:
        os.kill(os.getpid(), ended_by)
        return await real(self, *args)

    monkeypatch.setattr(Bench, "_apart", ended)
    out, svg = tmp_path / "new" / "run.json", tmp_path / "run.svg"
    small = ("--contexts", "300", "--users", "1,2", "--repeats", "1", "--answer-tokens", "8")
    result = CliRunner().invoke(main, ["bench", *small, "--out", str(out), "--svg", str(svg)])
    assert result.exit_code == 130, result.output
    run = load_run(out)
    names = {row.name for row in run.rows}
    assert names >= {"prefill, 300 tokens", "restore, object, 300 tokens"} or "first token, object, 300 tokens" in names
    assert not any("documents" in name for name in names)
    assert ("restore from Redis", "not configured: PREREAD_REDIS_URL") in {(p.name, p.why) for p in run.left_out}
    assert svg.exists()
    assert "7 of 7: decode of 2 users on 2 documents of 300 tokens (about" in result.output
    assert not any((tmp_path / "data").glob(".bench-*"))
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["bench", "--out", str(tmp_path / "file" / "run.json")])
    assert result.exit_code != 0
    assert "Loading" not in result.output


@pytest.mark.anyio
async def test_answers_that_fill_the_context_are_said_to(tmp_path: Path) -> None:
    bench = await measured(tmp_path, Work(contexts=(300,), users=(1,), repeats=1, answer_tokens=600))
    assert not bench.rows
    assert all("--answer-tokens" in part.why for part in bench.left_out)
