"""`preread bench`."""

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.cli.numbers import AMOUNT, MOST_TOKENS, Finite
from service.cli.output import EXIT_FAILURE, EXIT_INTERRUPTED, err, expected_errors, json_option, print_json

if TYPE_CHECKING:
    from service.bench.measure import Bench, Progress, Work
    from service.bench.physics import Physics
    from service.bench.results import Run
    from service.settings import Settings

_FILE = click.Path(dir_okay=False, path_type=Path)


def _numbers(_: Any, __: Any, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and 0 < int(part[:20]) <= MOST_TOKENS for part in parts):
        raise click.BadParameter(f"whole numbers from 1 to {MOST_TOKENS:,} with commas between")
    return tuple(int(part) for part in parts)


def _writable(_: Any, __: Any, path: Path | None) -> Path | None:
    """Seen before anything is measured, not after."""
    if path is not None:
        folder = path.absolute().parent
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise click.BadParameter(f"{path} cannot be written")
    return path


@click.command()
@click.option("--contexts", default="1024,4096", show_default=True, callback=_numbers, help="Tokens of documents.")
@click.option("--users", default="1,4,8", show_default=True, callback=_numbers, help="Who ask at once.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Of every figure.")
@click.option("--answer-tokens", type=click.IntRange(8), default=24, show_default=True, help="Tokens of an answer.")
@click.option("--minutes", type=Finite(0, min_open=True), default=15.0, show_default=True, help="At most.")
@click.option("--bandwidth", type=AMOUNT, default=0.0, help="Of the memory in GB/s, in place of what is found.")
@click.option("--card", default="", help="Its name in the table, where the driver does not say it (exl2 engine).")
@click.option("--out", type=_FILE, callback=_writable, help="Write the run into this file.")
@click.option("--svg", type=_FILE, callback=_writable, help="Draw a roofline plot into this file.")
@click.option("--against", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="An earlier run's file.")
@click.option("--worse", type=Finite(0), default=0.2, show_default=True, help="Share by which a figure may be worse.")
@json_option
@expected_errors
def bench(
    out: Path | None, svg: Path | None, against: Path | None, worse: float, as_json: bool, **options: Any
) -> None:
    """Measure prefill, decode, first tokens and restore with the model of the settings, beside the physical bound.

    The engine runs in this process, on documents of random tokens in a folder of its own. Ctrl-C, or the end of
    --minutes, ends it with what was measured until then. Exit code 1: a figure is worse than that of --against by more
    than --worse. 130: it was ended.
    """
    from service.bench.results import compare, load_run
    from service.cli.config import read_settings

    before = load_run(against) if against else None
    try:
        run, interrupted = asyncio.run(_measured(read_settings(), options))
    except (asyncio.CancelledError, KeyboardInterrupt):
        err.print("Ended: nothing that was measured is kept.")
        raise SystemExit(EXIT_INTERRUPTED) from None
    changes = compare(before, run) if before else []
    if as_json:
        print_json({"run": run, "changes": changes})
    else:
        _print(run, before)
    _keep(run, out, svg)
    if interrupted:
        err.print("Ended: what was measured until then is kept.")
        raise SystemExit(EXIT_INTERRUPTED)
    if any(change.worse_than(worse) for change in changes):
        raise SystemExit(EXIT_FAILURE)


def _print(run: "Run", before: "Run | None") -> None:
    from service.bench.report import changes_text, run_text
    from service.bench.results import compare, differences

    click.echo(run_text(run))
    if before:
        click.echo("\n" + changes_text(compare(before, run), differences(before, run)))


def _keep(run: "Run", out: Path | None, svg: Path | None) -> None:
    from service.bench.results import save_run
    from service.bench.roofline import roofline

    if out:
        save_run(run, out)
    if svg:
        svg.write_text(roofline(run), encoding="utf-8")


async def _measured(settings: "Settings", options: dict[str, Any]) -> "tuple[Run, bool]":
    """What was measured, and whether somebody ended it before its time. Raises CancelledError when nothing had been
    measured by then."""
    from service.bench.measure import Work
    from service.bench.physics import physics_of
    from service.bench.run import place_of, run_of

    _end_at_sigterm()
    physics = physics_of(settings, settings.model_dir, options["bandwidth"], options["card"])
    names = ("contexts", "users", "repeats", "answer_tokens", "minutes")
    work = Work(**{name: options[name] for name in names})
    bench: Bench | None = None
    interrupted = False
    try:
        async with _opened(settings, work, physics) as bench:
            await bench.run()
    except asyncio.CancelledError:
        if bench is None or not bench.rows:
            raise
        interrupted = True
    return run_of(place_of(settings, bench.engine.info), settings, bench), interrupted


def _end_at_sigterm() -> None:
    """As Ctrl-C does: from here on it is this task that ends, whatever it waits for."""
    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError, RuntimeError):  # elsewhere than on Unix, or in another thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


@asynccontextmanager
async def _opened(settings: "Settings", work: "Work", physics: "Physics | None") -> "AsyncIterator[Bench]":
    """The engine with a store of its own, and the tiers; closed and removed again whenever somebody ends it."""
    from cache_store.tiers.opening import open_tiers
    from service.bench.measure import Bench
    from service.bench.run import bench_config
    from service.bench.waiting import ended, to_end
    from service.core.snapshot_tier import tier_config
    from service.engine.local import LocalEngine

    with ExitStack() as stack:
        directory = stack.enter_context(_directory(settings.data_dir))
        tell = stack.enter_context(_told())
        tiers = open_tiers(tier_config(settings))
        for tier in tiers:
            stack.callback(tier.close)
        opening = asyncio.ensure_future(LocalEngine.open(bench_config(settings, directory, work)))
        interrupted = await ended(opening)  # nothing ends a model's loading, which writes into the directory
        engine = opening.result()
        try:
            if interrupted:
                raise asyncio.CancelledError
            # Another one may measure with the same tiers.
            owner = f"bench-{secrets.token_hex(4)}"
            yield Bench(engine, directory, physics, work, owner, tiers, tell)
        finally:
            await to_end(asyncio.ensure_future(engine.close()))


@contextmanager
def _directory(data_dir: Path) -> "Iterator[Path]":
    """Takes no figure with it when it cannot be removed."""
    data_dir.mkdir(parents=True, exist_ok=True)
    directory = tempfile.TemporaryDirectory(dir=data_dir, prefix=".bench-")
    try:
        yield Path(directory.name)
    finally:
        try:
            directory.cleanup()
        except OSError as error:
            err.print(f"{directory.name} could not be removed: {error}", markup=False)


@contextmanager
def _told() -> "Iterator[Callable[[Progress], None]]":
    """Says what is measured and how long the rest takes: in one line on a terminal, else a line for each part."""
    from service.bench.report import length_text

    def text(progress: "Progress") -> str:
        left = length_text(progress.left_s)
        return f"{progress.number} of {progress.parts}: {progress.name} (about {left} left; Ctrl-C keeps what is done)"

    if not err.is_terminal:
        err.print("Loading the model ...")
        yield lambda progress: err.print(f"  {text(progress)}", markup=False)
        return
    with err.status("Loading the model") as status:
        yield lambda progress: status.update(text(progress))
