"""`preread bench`."""

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.cli.output import EXIT_FAILURE, EXIT_INTERRUPTED, err, expected_errors, json_option, print_json

if TYPE_CHECKING:
    from service.bench.measure import Bench, Progress
    from service.bench.results import Run
    from service.settings import Settings

_FILE = click.Path(dir_okay=False, path_type=Path)


def _numbers(_: Any, __: Any, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise click.BadParameter("whole numbers above 0 with commas between")
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
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=15.0, show_default=True, help="At most.")
@click.option("--bandwidth", type=float, default=0.0, help="Of the memory in GB/s, in place of what is found.")
@click.option("--card", default="", help="Its name in the table, where the driver does not say it (exl2 engine).")
@click.option("--out", type=_FILE, callback=_writable, help="Write the run into this file.")
@click.option("--svg", type=_FILE, callback=_writable, help="Draw a roofline plot into this file.")
@click.option("--against", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="An earlier run's file.")
@click.option("--worse", type=float, default=0.2, show_default=True, help="Share by which a figure may be worse.")
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
    run, interrupted = asyncio.run(_measured(read_settings(), options))
    changes = compare(before, run) if before else []
    if as_json:
        print_json({"run": run, "changes": changes})
    else:
        _print(run, before)
    _keep(run, out, svg)
    if interrupted:
        err.print("Ended: what was measured until then is kept.")
        raise SystemExit(EXIT_INTERRUPTED)
    if any(change.better_by < -worse for change in changes):
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
    """What was measured, and whether somebody ended it before its time."""
    from cache_store.tiers.opening import open_tiers
    from service.bench.measure import Bench, Work
    from service.bench.physics import physics_of
    from service.bench.run import bench_config, place_of, run_of
    from service.core.snapshot_tier import tier_config
    from service.engine.local import LocalEngine

    physics = physics_of(settings, settings.model_dir, options["bandwidth"], options["card"])
    names = ("contexts", "users", "repeats", "answer_tokens", "minutes")
    work = Work(**{name: options[name] for name in names})
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.data_dir, prefix=".bench-") as directory, _told() as tell:
        tiers = open_tiers(tier_config(settings))
        engine = await LocalEngine.open(bench_config(settings, Path(directory), work))
        try:
            # Another one may measure with the same tiers.
            owner = f"bench-{secrets.token_hex(4)}"
            bench = Bench(engine, Path(directory), physics, work, owner, tiers, tell)
            interrupted = await _until_ended(bench)
            return run_of(place_of(settings, engine.info), settings, bench), interrupted
        finally:
            await engine.close()
            for tier in tiers:
                tier.close()


async def _until_ended(bench: "Bench") -> bool:
    """Whether Ctrl-C or SIGTERM ended it. Raises CancelledError when nothing had been measured by then."""
    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError, RuntimeError):  # elsewhere than on Unix, or in another thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await bench.run()
    except asyncio.CancelledError:
        if not bench.rows:
            raise
        return True
    return False


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
