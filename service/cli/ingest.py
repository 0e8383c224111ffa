"""`preread ingest`."""

import asyncio
from pathlib import Path
from typing import Any

import click

from service.cli.output import (
    EXIT_FAILURE,
    err,
    expected_errors,
    json_option,
    nbytes_text,
    print_json,
    retention_option,
)
from service.cli.remote import current_remote
from service.words import counted


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--password", help="Opens encrypted PDFs; it is not stored.")
@retention_option
@json_option
@expected_errors
def ingest(files: tuple[Path, ...], password: str | None, retention: str, as_json: bool) -> None:
    """Read FILES (PDF, DOCX, HTML, EPUB, Markdown, text) and keep their snapshots, so that questions need not read them
    again.

    A file whose bytes are known already is not read again. When one cannot be read, the others still are, and
    the exit code is 1. With `preread --server URL ingest ...` they are sent to that server, which reads them.
    """
    if (remote := current_remote()) is not None:
        from service.cli.remote_ingest import ingest_there

        results = ingest_there(remote, files, password, retention)
    else:
        results = asyncio.run(_ingest(files, password, retention))
    if as_json:
        print_json({"documents": results})
    if any(result["error"] for result in results):
        raise SystemExit(EXIT_FAILURE)


async def _ingest(files: tuple[Path, ...], password: str | None, retention: str) -> list[dict[str, Any]]:
    from service.cli.config import read_settings
    from service.cli.local import local_services

    async with local_services(read_settings()) as services:
        return [await _one(services, path, password, retention) for path in files]


async def _one(services: Any, path: Path, password: str | None, retention: str) -> dict[str, Any]:
    from service.cli.documents import described, read_document
    from service.errors import ServiceError

    try:
        row, created = await read_document(services, path, password=password, retention=retention)
    except ServiceError as error:
        return not_read(path, error.code, error.detail)
    return was_read(path, await described(services, row.id), created)


def was_read(path: Path, document: Any, created: bool) -> dict[str, Any]:
    """Say what became of a file, here or at a server; the same for --json."""
    known = "" if created else " (already read)"
    size, pages = nbytes_text(document.snapshot.nbytes or 0), counted(document.page_count or 0, "page")
    what = f"{document.id}, {pages}, {document.token_count} tokens, snapshot {size}, {_kept(document.snapshot)}"
    err.print(f"{path}: {what}{known}", markup=False)
    return {"path": _shown(path), "created": created, "document": document, "error": None}


def not_read(path: Path, code: str, detail: str) -> dict[str, Any]:
    """Say why a file has no document; the same for --json."""
    err.print(f"{path}: {detail}", markup=False, style="red")
    return {"path": _shown(path), "created": False, "document": None, "error": {"code": code, "message": detail}}


def _shown(path: Path) -> str:
    """A name on a disk need not be UTF-8, as JSON is."""
    return str(path).encode(errors="replace").decode()


def _kept(snapshot: Any) -> str:
    """What stays in memory of a document, for people."""
    if snapshot.resident_nbytes is None:
        return "kept whole"
    retention = snapshot.retention
    chosen = ", chosen because it is long" if retention.automatic else ""
    return f"{snapshot.resident_tokens} of its tokens stay in memory ({retention.preset}{chosen})"
