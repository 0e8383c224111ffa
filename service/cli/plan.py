"""`preread plan`."""

from pathlib import Path
from typing import Any

import click
import msgspec

from service.cli.numbers import AMOUNT, AT_ONCE, BITS, COUNT, FEW, TOKENS
from service.cli.output import EXIT_FAILURE, expected_errors, json_option, print_json
from service.paths import expanded

_MODEL = (
    ("--layers", FEW, "Layers of a model that is not here."),
    ("--kv-heads", FEW, "Its heads of keys and values."),
    ("--head-dim", FEW, "Width of one of its heads."),
    ("--weights-gb", AMOUNT, "Its weights in GB (10^9 bytes)."),
    ("--params", AMOUNT, "Its parameters in billions."),
    ("--bits", BITS, "Bits of a weight; also for a model that is here, as if it were converted."),
    ("--heads", FEW, "Its query heads; guessed if left out, as are the next four."),
    ("--hidden", COUNT, "Width of its states."),
    ("--intermediate", COUNT, "Width of its MLP."),
    ("--vocab", COUNT, "Tokens of its vocabulary."),
    ("--max-context", COUNT, "Positions it was trained for."),
)


def _given(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """0 stands for what was left out: given, it would be ignored."""
    if not value and context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE:
        raise click.BadParameter("it has to be above 0.")
    return value


def _dimensions(command: Any) -> Any:
    for name, kind, text in reversed(_MODEL):
        command = click.option(name, type=kind, default=0, callback=_given, help=text)(command)
    return command


@click.command()
@click.argument("model", required=False)
@_dimensions
@click.option("--engine", type=click.Choice(["llamacpp"]), help="Plan for a GGUF as it lies, served by llama.cpp.")
@click.option("--card", default="", help="v100-16, t4, rtx-3090, h200, cpu, ...; the one that is here if left out.")
@click.option(
    "--memory-gb", type=AMOUNT, default=0.0, callback=_given, help="Memory of the card in GiB, in place of the table's."
)
@click.option(
    "--bandwidth",
    type=AMOUNT,
    default=0.0,
    callback=_given,
    help="Of the card's memory in GB/s, in place of the table's.",
)
@click.option("--context", type=TOKENS, default=32_768, show_default=True, help="Tokens of a document.")
@click.option("--kv-type", type=click.Choice(["fp16", "k8v8", "k8v4", "k4v4"]), help="The setting's if left out.")
@click.option("--window", type=COUNT, default=0, help="Tokens of a document's end that stay, in place of --retention.")
@click.option("--summary", type=COUNT, default=0, help="Tokens chosen of the rest that stay, with --window.")
@click.option("--users", type=AT_ONCE, default=1, show_default=True, help="Answers at once.")
@click.option("--documents", type=AT_ONCE, default=1, show_default=True, help="That they ask about.")
@click.option("--draft-model", default="", help="A model beside it that guesses: a directory or a name.")
@click.option("--disk", type=AMOUNT, default=0.0, callback=_given, help="What the disk reads in GB/s.")
@click.option(
    "--retention",
    default="",
    help="What stays in memory: full (if left out), balanced, small, or JSON as at an upload.",
)
@json_option
@expected_errors
def plan(model: str | None, as_json: bool, **options: Any) -> None:
    """Say what fits and how fast it can be, before anything is loaded.

    MODEL is a directory (EXL2, GPTQ, plain safetensors), a GGUF file, or the name of an imported model; without it,
    give dimensions. Exit code 0: it fits; 1: it does not.
    """
    from service.planning.conversion import conversion_of
    from service.planning.plan import make_plan
    from service.planning.report import report

    facts, card, wanted = _asked(model, options)
    made, ledger = make_plan(facts, card, wanted)
    if model is not None and facts.kind == "plain" and made.conversion is not None:
        # as it was given here: the model's name alone is not found from everywhere
        made = msgspec.structs.replace(made, conversion=conversion_of(model, made.conversion.bits))
    if as_json:
        print_json(made)
    else:
        click.echo(report(made, ledger))
    if not made.fits:
        raise SystemExit(EXIT_FAILURE)


def _check_together(model: str | None, options: dict[str, Any]) -> None:
    """Raises UsageError for options of which one would be ignored, and for a name that is empty."""
    if model == "":
        raise click.UsageError("MODEL is empty.")
    for name, _, _ in _MODEL:
        if model is not None and name != "--bits" and options[name[2:].replace("-", "_")]:
            raise click.UsageError(f"{name} describes a model that is not here: give it or MODEL, not both.")
    if options["window"] and options["retention"]:
        raise click.UsageError("--window is in place of --retention: give one of them.")
    if options["summary"] and not options["window"]:
        raise click.UsageError("--summary goes with --window, which is missing.")


def _asked(model: str | None, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, card and wishes of the command line, the settings behind them."""
    _check_together(model, options)
    from cache_store.layout import KVType
    from service.cli.config import read_settings
    from service.core.wishes import parse_wish
    from service.planning.detect import find_card
    from service.planning.llama import as_file
    from service.planning.model import requantized
    from service.planning.placing import llama_takes_cards, served_by_llama
    from service.planning.request import Wanted, kept_of

    settings = read_settings()
    facts = _facts(model, options, settings.models_dir)
    more = options["bandwidth"], round(options["memory_gb"] * 2**30)
    card = find_card(options["card"], *more)
    by_llama = options["engine"] == "llamacpp" or served_by_llama(settings, facts, card)
    if by_llama and not (card.is_cpu or options["card"]) and not llama_takes_cards(settings):
        card = find_card("cpu", *more)
    if options["bits"] and facts.kind != "dimensions":
        facts = requantized(as_file(facts) if by_llama else facts, options["bits"])
    wanted = Wanted(
        context=options["context"],
        kv_type=KVType(options["kv_type"] or settings.kv_type),
        kept=kept_of(parse_wish(options["retention"]), options["window"], options["summary"]),
        users=options["users"],
        documents=options["documents"],
        reserve_nbytes=settings.gpu_reserve_bytes,
        by_llama=by_llama,
        guesses=settings.speculation != "off" or bool(options["draft_model"]),  # it is asked what that takes
        resident_nbytes=0,
        compute=_compute(settings.compute_dtype),
        disk_gbps=options["disk"],
        draft=_draft(options["draft_model"], model, settings.models_dir) if options["draft_model"] else None,
    )
    return facts, card, wanted


def _facts(model: str | None, options: dict[str, Any], models_dir: Path) -> Any:
    from service.planning.headers import read_model
    from service.planning.model import Dimensions, from_dimensions

    if model is None:
        sizes = ("layers", "kv_heads", "head_dim", "weights_gb", "bits", "heads", "hidden", "intermediate", "vocab")
        given = {name: options[name] for name in sizes}
        return from_dimensions(Dimensions(**given, params_b=options["params"], max_context=options["max_context"]))
    return read_model(_place(model, models_dir))


def _place(model: str, models_dir: Path) -> Path:
    path = expanded(model, "MODEL")
    return path if path.exists() or "/" in model else models_dir / model


def _draft(draft: str, model: str | None, models_dir: Path) -> Any:
    """Its facts; other tokens than the model's are a problem of it, where both have a tokenizer's file."""
    from dataclasses import replace

    from service.engine.models.draft import first_difference
    from service.planning.headers import read_model

    facts, places = read_model(_place(draft, models_dir)), [_place(name, models_dir) for name in (model, draft) if name]
    if len(places) < 2 or not all((place / "tokenizer.json").is_file() for place in places):
        return facts
    found = first_difference(*places)
    return replace(facts, problems=(*facts.problems, f"it has other tokens: {found}")) if found else facts


def _compute(dtype: str) -> str:
    from service.engine.factory import resolve_dtype

    return resolve_dtype(dtype)
