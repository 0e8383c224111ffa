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
    the exit code is 1.
    """
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
    from service.cli.documents import described, kept_text, read_document
    from service.errors import ServiceError

    try:
        row, created = await read_document(services, path, password=password, retention=retention)
    except ServiceError as error:
        err.print(f"{path}: {error.detail}", markup=False, style="red")
        return {
            "path": str(path), "created": False, "document": None,
            "error": {"code": error.code, "message": error.detail},
        }  # fmt: skip
    known = "" if created else " (already read)"
    size, pages = nbytes_text(row.snapshot_nbytes or 0), counted(row.page_count or 0, "page")
    err.print(
        f"{path}: {row.id}, {pages}, {row.token_count} tokens, snapshot {size}, {kept_text(row)}{known}",
        markup=False,
    )
    return {
        "path": str(path), "created": created, "document": await described(services, row.id), "error": None,
    }  # fmt: skip
