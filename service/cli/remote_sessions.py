"""`preread --server URL sessions`."""

from itertools import islice
from typing import TYPE_CHECKING

import click
import msgspec

from service.cli.answers import show_end, show_question, show_session, show_text
from service.cli.output import err, expected_errors, for_terminal, json_option, print_json
from service.cli.remote import Remote, pass_remote
from service.words import counted

if TYPE_CHECKING:
    from service.client import Session


@click.group()
def sessions() -> None:
    """Sessions of the server that --server names."""


@sessions.command("list")
@click.option("--shared", is_flag=True, help="Those of others that are shared with you.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Most sessions.")
@json_option
@expected_errors
@pass_remote
def list_(remote: Remote, shared: bool, limit: int, as_json: bool) -> None:
    """Your sessions, newest first."""
    with remote.client() as client:
        found = list(islice(client.sessions.list(shared=shared, page_size=min(limit, 100)), limit))
    if as_json:
        print_json({"sessions": found})
        return
    for session in found:
        click.echo(_line(session))


@sessions.command()
@click.argument("session_id")
@json_option
@expected_errors
@pass_remote
def show(remote: Remote, session_id: str, as_json: bool) -> None:
    """A session with its questions and answers."""
    with remote.client() as client:
        session = client.sessions.get(session_id)
    if as_json:
        print_json(session)
        return
    click.echo(_line(session))
    names = {id: id for id in session.document_ids} if len(session.document_ids) > 1 else {}
    for turn in session.turns:
        show_question(turn.question)
        if turn.answer is not None:
            show_text(turn.answer.text)
            show_end(msgspec.to_builtins(turn.answer), names)
        else:
            err.print(f"  {turn.error.message if turn.error else turn.status}", style="yellow", markup=False)


@sessions.command()
@click.argument("session_id")
@click.option("--after", "after_turn", help="Take over the answers through this one, by its id.")
@click.option("--title", help="As before if left out.")
@json_option
@expected_errors
@pass_remote
def fork(remote: Remote, session_id: str, after_turn: str | None, title: str | None, as_json: bool) -> None:
    """A new session with the same questions and answers, which goes its own way."""
    with remote.client() as client:
        made = client.sessions.fork(session_id, after_turn=after_turn, title=title)
    if as_json:
        print_json(made)
        return
    click.echo(_line(made))
    show_session(made.id)


@sessions.command()
@click.argument("session_ids", nargs=-1, required=True)
@json_option
@expected_errors
@pass_remote
def delete(remote: Remote, session_ids: tuple[str, ...], as_json: bool) -> None:
    """Remove sessions with their questions and answers."""
    with remote.client() as client:
        for session_id in session_ids:
            client.sessions.delete(session_id)
    if as_json:
        print_json({"deleted": list(session_ids)})
    err.print(f"{counted(len(session_ids), 'session')} deleted.", style="dim")


def _line(session: "Session") -> str:
    title = f' "{session.title}"' if session.title else ""
    at = f", {session.updated_at:%Y-%m-%d %H:%M UTC}" if session.updated_at else ""
    return for_terminal(f"{session.id}{title}: {', '.join(session.document_ids)}{at}")
