"""What the terminal shows: results on standard output, everything else on standard error, no tracebacks for
errors that are expected."""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TextIO, TypeVar

import click
import msgspec
from rich.console import Console

P = ParamSpec("P")
T = TypeVar("T")

err = Console(stderr=True, highlight=False, soft_wrap=True)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")

retention_option = click.option(
    "--retention",
    default="",
    help="What stays in memory: full, balanced, small, or JSON with sink_tokens, summary_tokens and window_tokens. "
    "Chosen by the document's length if left out.",
)


def print_json(value: Any) -> None:
    """One JSON document, one line."""
    try:
        line = msgspec.json.encode(value)
    except UnicodeEncodeError:
        line = msgspec.json.encode(_as_text(msgspec.to_builtins(value, str_keys=True)))
    sys.stdout.write(line.decode() + "\n")
    sys.stdout.flush()


def _as_text(value: Any) -> Any:
    """Bytes of file names that are no UTF-8 (Python's lone surrogates) replaced: JSON has none."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_as_text(key): _as_text(each) for key, each in value.items()}
    return [_as_text(each) for each in value] if isinstance(value, list | tuple) else value


def fail(message: str, *, code: str = "error", as_json: bool = False) -> NoReturn:
    """Say why and end with exit code 1."""
    err.print("[bold red]preread:[/] ", end="")
    err.print(message, markup=False)
    if as_json:
        print_json({"error": {"code": code, "message": message}})
    raise SystemExit(EXIT_FAILURE)


def expected_errors(command: Callable[P, T]) -> Callable[P, T]:
    """End a command with a sentence instead of a traceback when what went wrong is foreseen."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        as_json = bool(kwargs.get("as_json"))
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            message = "Interrupted: what was finished is kept, and is gone on with the next time."
            err.print(message)
            if as_json:
                print_json({"error": {"code": "interrupted", "message": message}})
            raise SystemExit(EXIT_INTERRUPTED) from None
        except Exception as error:
            if (told := _told(error)) is None:
                raise
            fail(told[1], code=told[0], as_json=as_json)

    return wrapped


def _told(error: Exception) -> tuple[str, str] | None:
    """Code and message of an error that is expected."""
    from service.client.errors import PrereadError
    from service.errors import DatabaseUnavailable, ServiceError

    if isinstance(error, DatabaseUnavailable) and error.place:
        return error.code, f"{error.detail} It should be at {error.place}."
    if isinstance(error, ServiceError | PrereadError):
        return error.code, error.detail
    # After that: asking a server needs no engine, and nothing of what one needs.
    from cache_store.errors import CacheStoreError
    from ingest.errors import IngestError
    from service.engine.models.errors import ModelError
    from service.engine.protocol import EngineLost

    if isinstance(error, ModelError | CacheStoreError | IngestError | EngineLost):
        return type(error).__name__, str(error)
    if isinstance(error, OSError):
        return "os_error", f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return _settings_error(error)


def _settings_error(error: Exception) -> tuple[str, str] | None:
    if type(error).__name__ != "ValidationError" or not hasattr(error, "errors"):
        return None
    wrong = error.errors()  # type: ignore[attr-defined]
    return "settings", "; ".join(f"PREREAD_{str(e['loc'][0]).upper()}: {e['msg']}" for e in wrong if e["loc"])


def for_terminal(text: str, to: TextIO | None = None) -> str:
    """Text of documents, models and other people as a terminal may have it: its control characters would be commands
    to it. For a pipe or a file it stays as it is. `to` is standard output if left out."""
    return _CONTROL.sub("\ufffd", text) if (to or sys.stdout).isatty() else text


def nbytes_text(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
