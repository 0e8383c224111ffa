"""`preread --server URL documents`."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.cli.output import err, expected_errors, for_terminal, json_option, nbytes_text, print_json
from service.cli.remote import Remote, pass_remote
from service.words import counted

if TYPE_CHECKING:
    from service.client import Document


@click.group()
def documents() -> None:
    """Documents of the server that --server names."""


@documents.command("list")
@click.option("--shared", is_flag=True, help="Those of others that are shared with you.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Most documents.")
@json_option
@expected_errors
@pass_remote
def list_(remote: Remote, shared: bool, limit: int, as_json: bool) -> None:
    """Your documents, newest first."""
    with remote.client() as client:
        found = list(islice(client.documents.list(shared=shared, page_size=min(limit, 100)), limit))
    if as_json:
        print_json({"documents": found})
        return
    for document in found:
        click.echo(_line(document))


@documents.command()
@click.argument("document_id")
@json_option
@expected_errors
@pass_remote
def show(remote: Remote, document_id: str, as_json: bool) -> None:
    """One document, and how far it is."""
    with remote.client() as client:
        _tell(client.documents.get(document_id), as_json)


@documents.command()
@click.argument("document_id")
@click.argument("number", type=click.IntRange(1))
@json_option
@expected_errors
@pass_remote
def page(remote: Remote, document_id: str, number: int, as_json: bool) -> None:
    """The text of a page as the model got it."""
    with remote.client() as client:
        found = client.documents.page(document_id, number)
    if as_json:
        print_json(found)
    else:
        click.echo(for_terminal(found.text))


@documents.command()
@click.argument("document_id")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Its own name if left out.")
@expected_errors
@pass_remote
def download(remote: Remote, document_id: str, output: Path | None) -> None:
    """Save the file that was uploaded."""
    with remote.client() as client:
        target = output or _target(client.documents.get(document_id))
        if output is None and (target.exists() or target.is_symlink()):
            raise click.UsageError(f"{target} is there already: say with -o where to write.")
        client.documents.save_file(document_id, target)
    err.print(f"{target}: {nbytes_text(target.stat().st_size)}", markup=False)


@documents.command()
@click.argument("document_id")
@click.option("--off", is_flag=True, help="No longer.")
@json_option
@expected_errors
@pass_remote
def pin(remote: Remote, document_id: str, off: bool, as_json: bool) -> None:
    """Keep a document from expiring and its snapshot from eviction."""
    with remote.client() as client:
        _tell(client.documents.update(document_id, pinned=not off), as_json)


@documents.command()
@click.argument("document_id")
@json_option
@expected_errors
@pass_remote
def cancel(remote: Remote, document_id: str, as_json: bool) -> None:
    """Stop reading a document."""
    with remote.client() as client:
        _tell(client.documents.cancel(document_id), as_json)


@documents.command()
@click.argument("document_ids", nargs=-1, required=True)
@json_option
@expected_errors
@pass_remote
def delete(remote: Remote, document_ids: tuple[str, ...], as_json: bool) -> None:
    """Remove documents from every tier, with their sessions, and say what was removed."""
    receipts: dict[str, Any] = {}
    with remote.client() as client:
        for document_id in document_ids:
            receipts[document_id] = receipt = client.documents.delete(document_id)
            if not as_json:  # one by one: what is gone is said also when another one is not there
                parts = [f"{part.tier} {nbytes_text(part.nbytes)}" for part in receipt.removed if part.objects]
                click.echo(f"{document_id}: removed from {', '.join(parts) or 'nowhere'}")
    if as_json:
        print_json({"deleted": receipts})


def _target(document: "Document") -> Path:
    """The file's own name, which leads into no other folder and hides nothing."""
    return Path(Path(document.filename).name.lstrip(".") or document.id)


def _tell(document: "Document", as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        click.echo(_line(document))
        for warning in document.warnings:
            err.print(f"  {warning}", style="yellow", markup=False)


def _line(document: "Document") -> str:
    parts: list[Any] = [document.status]
    if document.status not in ("ready", "failed", "cancelled"):
        progress = document.progress
        parts += [f"{progress.done:,} of {progress.total:,} {progress.unit}"] if progress.total else []
    if document.page_count is not None:
        parts.append(counted(document.page_count, "page"))
    if document.token_count is not None:
        parts.append(counted(document.token_count, "token"))
    parts += ["pinned"] if document.pinned else []
    parts += [f"until {document.expires_at:%Y-%m-%d %H:%M UTC}"] if document.expires_at else []
    parts += [document.error.message] if document.error else []
    return for_terminal(f'{document.id} "{document.title}": {", ".join(parts)}')
