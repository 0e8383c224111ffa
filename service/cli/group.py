"""The `preread` command and its parts. Importing this imports no part: `preread --help` is fast."""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from service.cli.remote import remote_of
from service.cli.streams import OutputLost, guarded_output

_COMMANDS = {
    "serve": ("service.cli.serve:serve", "Serve the REST API."),
    "worker": ("service.cli.worker:worker", "Serve the engine to the API processes of a fleet."),
    "ingest": ("service.cli.ingest:ingest", "Read documents and keep their snapshots."),
    "ask": ("service.cli.ask:ask", "Ask questions about a file, here or with --server."),
    "documents": ("service.cli.remote_documents:documents", "Documents of a server: list, show, delete ..."),
    "sessions": ("service.cli.remote_sessions:sessions", "Sessions of a server: list, show, fork, delete."),
    "plan": ("service.cli.plan:plan", "What fits a card and how fast it can be, before anything is loaded."),
    "doctor": ("service.cli.doctor:doctor", "Look for what makes this installation slow, or stops it."),
    "bench": ("service.cli.bench:bench", "Measure this installation beside the physical bound."),
    "models": ("service.cli.models:models", "Import, list, check and measure models."),
    "snapshots": ("service.cli.snapshots:snapshots", "List and check stored snapshots."),
    "keys": ("service.cli.keys:keys", "Make, list and revoke API keys."),
    "audit": ("service.cli.audit:audit", "Who did what."),
    "db": ("service.cli.database:database", "Bring the database up to date."),
}
EPILOG = """Exit codes: 0 all done, 1 something failed (standard error says why), 2 wrong usage, 130 interrupted, 141
the reader of a pipe went away.

Settings come from the environment (PREREAD_DATA_DIR, PREREAD_MODEL, ...) and the file PREREAD_CONFIG names."""


class LazyGroup(click.Group):
    """Finds commands in a table and imports them when they are called."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command and exit with its code."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            with guarded_output():
                code = self._run(words, *rest, **extra)
        except OutputLost as error:
            if error.exit_code == 1:
                with suppress(OSError):
                    click.echo(f"preread: {error}", err=True)
            code = error.exit_code
        sys.exit(code)

    def _run(self, words: list[str], *rest: Any, **extra: Any) -> int:
        try:
            done = super().main(words, *rest, standalone_mode=False, **extra)
        except click.ClickException as error:
            with suppress(OSError):  # standard error may be full: the code still says it
                error.show()
            if "--json" in (words[: words.index("--")] if "--" in words else words):
                _print_usage(error)
            return error.exit_code
        except click.Abort:
            with suppress(OSError):
                click.echo("Interrupted.", err=True)
            return 130
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return done if isinstance(done, int) else 0

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in _COMMANDS.items()])


def _print_usage(error: click.ClickException) -> None:
    from service.cli.output import print_json

    code = "usage" if isinstance(error, click.UsageError) else "error"
    print_json({"error": {"code": code, "message": error.format_message()}})


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="preread", prog_name="preread")
@click.option(
    "--server", envvar="PREREAD_SERVER", metavar="URL",
    help="Have ask, ingest, documents and sessions done by this server (PREREAD_SERVER).",
)  # fmt: skip
@click.option("--key", envvar="PREREAD_KEY", metavar="KEY", help="API key for it; better in PREREAD_KEY.")
@click.pass_context
def main(ctx: click.Context, server: str | None, key: str | None) -> None:
    """Answers questions about long documents that the model has read once."""
    ctx.obj = remote_of(ctx, server, key)
