"""`preread --server URL ask`."""

from pathlib import Path
from typing import Any

import msgspec

from service.cli.answers import show_end, show_question, show_session, show_text
from service.cli.ask import is_known, result_of
from service.cli.remote import Remote
from service.cli.remote_ingest import read_there
from service.client import Client, Done, Token
from service.errors import Invalid


def ask_server(
    remote: Remote,
    files: tuple[str, ...],
    questions: tuple[str, ...],
    session_id: str | None,
    how: dict[str, Any],
    quiet: bool,
    parameters: dict[str, Any],
) -> dict[str, Any]:
    """What --json prints. Raises PrereadError, Invalid, OSError."""
    sampling = {name: list(value) if isinstance(value, tuple) else value for name, value in parameters.items()}
    with remote.client() as client:
        ids = [_document(client, file, how) for file in files]
        session_id = _session(client, ids, session_id)
        names = dict(zip(ids, files, strict=True)) if len(ids) > 1 else {}
        answers = [_answer(client, session_id, question, names, quiet, sampling) for question in questions]
        if not quiet:
            show_session(session_id)
        return result_of([client.documents.get(document_id) for document_id in ids], session_id, answers)


def _document(client: Client, file: str, how: dict[str, Any]) -> str:
    if not is_known(file, how):
        return read_there(client, Path(file), **how)[0].id
    document = client.documents.get(file)
    if document.status != "ready":
        raise Invalid(f"The document {file} is {document.status}, not ready.")
    return file


def _session(client: Client, document_ids: list[str], session_id: str | None) -> str:
    if session_id is None:
        return client.sessions.create(document_ids).id
    if client.sessions.get(session_id).document_ids != document_ids:
        raise Invalid(f"The session {session_id} is about other documents.")
    return session_id


def _answer(
    client: Client, session_id: str, question: str, names: dict[str, str], quiet: bool, sampling: dict[str, Any]
) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if not quiet:
        show_question(question)
    with client.stream(session_id, question, **sampling) as events:
        for event in events:
            if isinstance(event, Token) and not quiet:
                show_text(event.text)
            elif isinstance(event, Done):
                answer = msgspec.to_builtins(event.answer)
    if not quiet:
        show_end(answer, names)
    return {"question": question, **answer}
