"""`preread ask`: a file, questions, answers; no server, or another machine's."""

import asyncio
from pathlib import Path
from typing import Any

import click

from service.cli.answers import show_end, show_question, show_session, show_text
from service.cli.output import expected_errors, json_option, print_json, retention_option
from service.cli.remote import current_remote


@click.command()
@click.argument("file")
@click.argument("questions", nargs=-1, required=True)
@click.option(
    "--with", "others", multiple=True, help="Ask about this file or id too; may be given several times.", metavar="FILE"
)
@click.option("--session", "session_id", help="Go on with this session (its id was printed).")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.")
@click.option("--temperature", type=float, help="0, the default, takes the likeliest token every time.")
@click.option("--top-p", type=float, help="Only the likeliest tokens that make up this share.")
@click.option("--top-k", type=int, help="Only this many of the likeliest tokens; 0 is no limit.")
@click.option("--seed", type=int, help="Makes answers with a temperature repeatable.")
@click.option("--stop", multiple=True, help="A string that ends an answer; may be given several times.")
@click.option("--password", help="Opens an encrypted PDF; it is not stored.")
@retention_option
@json_option
@expected_errors
def ask(
    file: str,
    questions: tuple[str, ...],
    others: tuple[str, ...],
    session_id: str | None,
    password: str | None,
    retention: str,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Answer QUESTIONS about FILE, each one a follow-up of those before.

    FILE is a path, or the id of a document that was read before. Answers and citations go to standard output. With
    `preread --server URL ask ...` that server reads the file and answers.
    """
    files = (file, *others)
    for each in files:
        if not each.startswith("doc_") and (not Path(each).exists() or Path(each).is_dir()):
            raise click.UsageError(f"There is no file {each!r}.")
    how = {"password": password, "retention": retention}
    if (remote := current_remote()) is not None:
        from service.cli.remote_ask import ask_server

        result = ask_server(remote, files, questions, session_id, how, as_json, parameters)
    else:
        result = asyncio.run(_ask(files, questions, session_id, how, as_json, parameters))
    if as_json:
        print_json(result)


async def _ask(
    files: tuple[str, ...],
    questions: tuple[str, ...],
    session_id: str | None,
    how: dict[str, Any],
    quiet: bool,
    parameters: dict[str, Any],
) -> dict[str, Any]:
    from service.cli.config import read_settings
    from service.cli.documents import described
    from service.cli.local import local_services
    from service.core.sampling import Question

    wanted = [Question(text, **parameters) for text in questions]
    for question in wanted:
        question.check()
    async with local_services(read_settings()) as services:
        ids = [await _document(services, file, how) for file in files]
        session_id = await _session(services, ids, session_id)
        names = dict(zip(ids, files, strict=True)) if len(ids) > 1 else {}
        answers = [await _answer(services, session_id, question, names, quiet) for question in wanted]
        if not quiet:
            show_session(session_id)
        documents = [await described(services, document_id) for document_id in ids]
        return result_of(documents, session_id, answers)


def result_of(documents: list[Any], session_id: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What --json prints."""
    shown = {"document": documents[0]} if len(documents) == 1 else {"documents": documents}
    return {**shown, "session_id": session_id, "answers": answers}


def is_known(file: str, how: dict[str, Any]) -> bool:
    """Whether it is an id rather than a file. Raises Invalid for options that are for files only."""
    from service.errors import Invalid

    if not file.startswith("doc_") or Path(file).exists():
        return False
    for name, why in (("retention", "that of a document that was read before stays"), ("password", "it is open")):
        if how[name]:
            raise Invalid(f"--{name} is for a file: {why}.")
    return True


async def _document(services: Any, file: str, how: dict[str, Any]) -> str:
    """`how` are the options of `read_document`, which do not change a document that was read before."""
    from service.cli.documents import existing_document, read_document

    if is_known(file, how):
        return (await existing_document(services, file)).id
    row, _ = await read_document(services, Path(file), **how)
    return row.id


async def _session(services: Any, document_ids: list[str], session_id: str | None) -> str:
    from service.api.principal import OWNER
    from service.errors import Invalid

    if session_id is None:
        return (await services.conversations.sessions.create(OWNER, document_ids)).id
    row, _ = await services.conversations.sessions.get(OWNER, session_id)
    if row.document_ids != document_ids:
        raise Invalid(f"The session {session_id} is about other documents.")
    return session_id


async def _answer(services: Any, session_id: str, question: Any, names: dict[str, str], quiet: bool) -> dict[str, Any]:
    """`names` are those of the documents, where there are several."""
    from service.api.principal import OWNER
    from service.errors import ServiceError

    stream = await services.conversations.answers.ask(OWNER, session_id, question)
    if not quiet:
        show_question(question.text)
    async for event in stream.events():
        if isinstance(event.data, ServiceError):
            raise event.data
        if event.name == "done":
            if not quiet:
                show_end(event.data, names)
            return {"question": question.text, **event.data}
        if event.name == "token" and not quiet:
            show_text(event.data["text"])
    raise ServiceError("The answer ended without a word.", code="internal_error")
