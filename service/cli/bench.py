"""`preread bench`."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import click

from service.cli.output import EXIT_FAILURE, err, expected_errors, json_option, print_json


def _numbers(_: Any, __: Any, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise click.BadParameter("whole numbers above 0 with commas between")
    return tuple(int(part) for part in parts)


@click.command()
@click.option("--contexts", default="1024,4096", show_default=True, callback=_numbers, help="Tokens of documents.")
@click.option("--users", default="1,4,8", show_default=True, callback=_numbers, help="Who ask at once.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Of every figure.")
@click.option("--answer-tokens", type=click.IntRange(8), default=24, show_default=True, help="Tokens of an answer.")
@click.option("--bandwidth", type=float, default=0.0, help="Of the memory in GB/s, in place of what is found.")
@click.option("--card", default="", help="Its name in the table, where the driver does not say it (exl2 engine).")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the run into this file.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw a roofline plot into this file.")
@click.option("--against", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="An earlier run's file.")
@click.option("--worse", type=float, default=0.2, show_default=True, help="Share by which a figure may be worse.")
@json_option
@expected_errors
def bench(
    out: Path | None, svg: Path | None, against: Path | None, worse: float, as_json: bool, **options: Any
) -> None:
    """Measure prefill, decode, first tokens and restore with the model of the settings, beside the physical bound.

    The engine runs in this process, on documents of random tokens in a folder of its own. Exit code 1: a figure is
    worse than that of --against by more than --worse.
    """
    from service.bench.report import changes_text, run_text
    from service.bench.results import compare, differences, load_run, save_run
    from service.bench.roofline import roofline
    from service.cli.config import read_settings

    before = load_run(against) if against else None
    run = asyncio.run(_measured(read_settings(), options))
    if out:
        save_run(run, out)
    if svg:
        svg.write_text(roofline(run), encoding="utf-8")
    changes = compare(before, run) if before else []
    if as_json:
        print_json({"run": run, "changes": changes})
    else:
        click.echo(run_text(run))
    if before and not as_json:
        click.echo("\n" + changes_text(changes, differences(before, run)))
    if any(change.better_by < -worse for change in changes):
        raise SystemExit(EXIT_FAILURE)


async def _measured(settings: Any, options: dict[str, Any]) -> Any:
    from service.bench.measure import Bench, Work
    from service.bench.physics import physics_of
    from service.bench.run import bench_config, place_of, run_of
    from service.engine.local import LocalEngine

    physics = physics_of(settings, settings.model_dir, options["bandwidth"], options["card"])
    work = Work(options["contexts"], options["users"], options["repeats"], options["answer_tokens"])
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.data_dir, prefix=".bench-") as directory:
        with err.status("Loading the model") as status:
            engine = await LocalEngine.open(bench_config(settings, Path(directory), work))
            try:
                bench = Bench(engine, Path(directory), physics, work, lambda text: status.update(f"Measuring {text}"))
                rows = await bench.rows()
                return run_of(place_of(settings, engine.info), physics, rows)
            finally:
                await engine.close()
