"""Commands that ask a server instead of this machine: `preread --server URL ...`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from service.client import Client

COMMANDS = frozenset({"ask", "ingest", "documents", "sessions"})
"""Those that have a remote form."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Remote:
    """The server that commands are for."""

    url: str
    key: str | None

    def client(self) -> "Client":
        """Raises click.UsageError for an address or a key that cannot be one."""
        from service.client import Client

        try:
            return Client(self.url, self.key or None)
        except ValueError as error:
            raise click.UsageError(str(error)) from None


def remote_of(ctx: click.Context, server: str | None, key: str | None) -> Remote | None:
    """What the options before the command say, or None for this machine. Raises click.UsageError for a command that
    has no such form."""
    command = ctx.invoked_subcommand
    if not server:
        if key and ctx.get_parameter_source("key") is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("--key is for a server: name it with --server URL or PREREAD_SERVER.")
        return None
    if command is not None and command not in COMMANDS:
        raise click.UsageError(
            f"`preread {command}` works on the machine it runs on and cannot be sent to {server}. Run it where that "
            "server runs, without --server and PREREAD_SERVER."
        )
    return Remote(server, key)


def pass_remote(command: Callable[Concatenate[Remote, P], T]) -> Callable[P, T]:
    """For a command that has no other form. Raises click.UsageError where no server is named."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        remote = current_remote()
        if remote is None:
            raise click.UsageError(
                "This asks a server: name it with --server URL, before the command, or PREREAD_SERVER."
            )
        return command(remote, *args, **kwargs)

    return wrapped


def current_remote() -> Remote | None:
    """The server that the running command is for, or None."""
    return click.get_current_context().find_object(Remote)
