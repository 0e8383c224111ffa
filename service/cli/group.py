"""The `preread` command and its parts. Importing this imports no part: `preread --help` is fast."""

import importlib

import click

_COMMANDS = {
    "serve": ("service.cli.serve:serve", "Serve the REST API."),
    "worker": ("service.cli.worker:worker", "Serve the engine to the API processes of a fleet."),
    "ingest": ("service.cli.ingest:ingest", "Read documents and keep their snapshots."),
    "ask": ("service.cli.ask:ask", "Ask questions about a file, without a server."),
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
def main() -> None:
    """Answers questions about long documents that the model has read once."""
