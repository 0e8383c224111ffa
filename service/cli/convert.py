"""`preread models convert`."""

import asyncio
from pathlib import Path
from typing import Any

import click

from service.cli.numbers import AT_ONCE, TOKENS
from service.cli.output import err, expected_errors, json_option, print_json
from service.cli.progress import stages
from service.paths import expanded


@click.command()
@click.argument("source")
@click.option("--bits", default="auto", show_default=True, help="Of a weight of the layers, 2.2 to 8; auto: what fits.")
@click.option("--head-bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), default="6", show_default=True)
@click.option("--name", help="Name of the model here; that of SOURCE with the bits if left out.")
@click.option(
    "--calibration", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A document to calibrate on, of any format that is read; again for more. The bundled mix fills up.",
)  # fmt: skip
@click.option("--rows", type=click.IntRange(1), default=100, show_default=True, help="Of calibration.")
@click.option("--row-tokens", type=click.IntRange(64), default=2048, show_default=True, help="Of one row.")
@click.option(
    "--measured-rows", type=click.IntRange(1), default=16, show_default=True, help="That choices are tried on."
)
@click.option(
    "--measurement", type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the measurement here, or take it from here: other bits of the same weights then need half the time.",
)  # fmt: skip
@click.option("--card", default="", help="With --bits auto: the card it shall fit; the one that is here if left out.")
@click.option("--context", type=TOKENS, default=32_768, show_default=True, help="With --bits auto.")
@click.option("--users", type=AT_ONCE, default=1, show_default=True, help="With --bits auto: answers at once.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Directory for what is in between.")
@click.option("--most-kl", type=float, help="Mean KL (nats) from the source's predictions up to which it is published.")
@click.option("--replace", is_flag=True, help="Replace a model of that name.")
@json_option
@expected_errors
def convert(source: str, as_json: bool, **options: Any) -> None:
    """Make an EXL2 model of SOURCE, a Hugging Face directory with plain weights or the name of an imported model, with
    exllamav2's converter on the card that is here.

    Takes from minutes to hours. Interrupted, it goes on where it was when the same command is run again. What comes out
    is compared with SOURCE on texts that it was not calibrated on, and recorded.
    """
    from service.cli.config import read_settings
    from service.cli.models import show
    from service.engine.models.convert.needs import check_source

    if options["bits"] != "auto":
        _check_alone()
    settings = read_settings()
    path = _source(source, settings.models_dir)
    check_source(path)
    bits = _bits(path, options, settings)
    with stages(f"Converting {path} to {bits:g} bits") as progress:
        from service.engine.models.convert.convert import convert_model, default_name

        name = options["name"] or default_name(path, bits)
        wanted = _wanted(bits, options)
        convert_model(
            path, wanted, name=name, models_dir=settings.models_dir, replace=options["replace"], progress=progress,
            work_dir=(options["work"] or settings.data_dir / "convert" / name).absolute(),
        )  # fmt: skip
    row = show(settings.models_dir / name)
    if as_json:
        print_json(row)
    else:
        from service.cli.models import lines

        click.echo("\n".join(lines(row)))
    _warn(row)


def _source(source: str, models_dir: Path) -> Path:
    """A directory, or an imported model of that name."""
    from service.engine.models.errors import ModelNotFound

    path = expanded(source, "SOURCE")
    for candidate in (path, models_dir / source):
        if candidate.exists():
            return candidate.resolve()
    raise ModelNotFound(f"there is no model {source}: give a Hugging Face directory, or the name of an imported model")


def _bits(path: Path, options: dict[str, Any], settings: Any) -> float:
    """Those given, or what a plan for the card finds."""
    if options["bits"] != "auto":
        try:
            return float(options["bits"])
        except ValueError:
            raise click.BadParameter("give a number, or auto", param_hint="--bits") from None
    from cache_store.layout import KVType
    from service.core.wishes import parse_wish
    from service.planning.conversion import bits_that_fit
    from service.planning.detect import find_card
    from service.planning.headers import read_model
    from service.planning.request import Wanted, kept_of

    card = find_card(options["card"])
    wanted = Wanted(
        context=options["context"],
        kv_type=KVType(settings.kv_type),
        kept=kept_of(parse_wish("")),
        users=options["users"],
        reserve_nbytes=settings.gpu_reserve_bytes,
        guesses=settings.speculation != "off",
    )
    bits, setting = bits_that_fit(read_model(path), card, wanted, int(options["head_bits"]))
    err.print(
        f"{bits:g} bits fit {card.name}: KV {setting.kv_type}, {setting.retention} of {options['context']:,} tokens, "
        f"at most {setting.tok_s:.0f} tok/s.{_reserve(setting.reserve_nbytes, settings)}",
        markup=False,
    )
    return bits


def _check_alone() -> None:
    """Raises UsageError for what only decides about bits where they are given."""
    context = click.get_current_context()
    for name in ("card", "context", "users"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} decides how many bits there are: leave it out, or --bits.")


def _reserve(nbytes: int, settings: Any) -> str:
    """What to serve it with, where it fits only because less of the card is left free."""
    if nbytes == settings.gpu_reserve_bytes:
        return ""
    return f" That takes a smaller reserve: serve it with PREREAD_GPU_RESERVE_BYTES={nbytes}."


def _wanted(bits: float, options: dict[str, Any]) -> Any:
    from service.engine.models.convert.convert import Wanted
    from service.engine.models.convert.record import REFUSE_KL
    from service.engine.models.convert.request import Rows

    return Wanted(
        bits=bits,
        head_bits=int(options["head_bits"]),
        own_texts=asyncio.run(_texts(options["calibration"])),
        rows=Rows(options["rows"], options["row_tokens"], options["measured_rows"]),
        measurement=options["measurement"],
        most_kl=REFUSE_KL if options["most_kl"] is None else options["most_kl"],
    )


async def _texts(paths: tuple[Path, ...]) -> list[str]:
    from ingest.sandbox import parse

    documents = [await parse(path) for path in paths]
    return ["\n\n".join(page.text for page in document.pages) for document in documents]


def _warn(row: dict[str, Any]) -> None:
    from service.engine.models.convert.record import WARN_KL

    likeness = row["conversion"]["likeness"]
    if likeness["mean_kl"] > WARN_KL:
        err.print(
            f"Its predictions differ noticeably from the source's: mean KL {likeness['mean_kl']:.3f} nats, where "
            f"{WARN_KL:g} is much. More bits, or documents like your own with --calibration, bring it nearer.",
            markup=False,
        )
