"""The `preread` command and its parts. Importing this imports no part: `preread --help` is fast."""

import importlib

import click

from service.cli.remote import remote_of

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
EPILOG = """Exit codes: 0 all done, 1 something failed (standard error says why), 2 wrong usage, 130 interrupted.

Settings come from the environment (PREREAD_DATA_DIR, PREREAD_MODEL, ...) and the file PREREAD_CONFIG names."""


class LazyGroup(click.Group):
    """Finds commands in a table and imports them when they are called."""

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
