"""`preread --server URL ingest`."""

from pathlib import Path
from typing import Any

from service.cli.ingest import not_read, was_read
from service.cli.progress import document_bar, sending_bar
from service.cli.remote import Remote
from service.client import APIError, Client, Document, DocumentFailed


def ingest_there(remote: Remote, files: tuple[Path, ...], password: str | None, retention: str) -> list[dict[str, Any]]:
    """What became of each file. Raises PrereadError when the server cannot be reached."""
    with remote.client() as client:
        return [_one(client, path, password, retention) for path in files]


def read_there(
    client: Client, path: Path, *, password: str | None = None, retention: str = ""
) -> tuple[Document, bool]:
    """A file's document once the server has read it, and whether it was new. Raises PrereadError, OSError."""
    with sending_bar(path.name) as sent:
        made = client.documents.upload(path, password=password, retention=retention or None, on_progress=sent)
    if made.status == "ready":
        return made, made.created
    with document_bar(path.name) as show:
        document = client.documents.wait(made.id, on_progress=lambda document: show(document.progress))
    return document, made.created


def _one(client: Client, path: Path, password: str | None, retention: str) -> dict[str, Any]:
    try:
        document, created = read_there(client, path, password=password, retention=retention)
    except (APIError, DocumentFailed) as error:
        return not_read(path, error.code, error.detail)
    return was_read(path, _plain(document), created)


def _plain(document: Document) -> Document:
    """Without what only an upload says."""
    import msgspec

    return msgspec.convert(msgspec.to_builtins(document), Document)
