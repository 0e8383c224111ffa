"""`preread snapshots evict`."""

import time
from typing import Any

import click

from service.cli.output import err, expected_errors, json_option, nbytes_text, print_json
from service.cli.stores import named, open_snapshots
from service.words import counted


@click.command()
@click.option("--bytes", "nbytes", type=click.IntRange(min=1), help="Free at least so many bytes.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and why, and change nothing.")
@json_option
@expected_errors
def evict(nbytes: int | None, dry_run: bool, as_json: bool) -> None:
    """Take snapshots off the disk whose loss costs least. Documents stay, and are read again when they are asked about.

    With --dry-run alone: everything that may go, in its order. Pinned documents and snapshots in use stay. A server may
    run meanwhile.
    """
    if nbytes is None and not dry_run:
        raise click.UsageError("Say how much: --bytes N. With --dry-run nothing is changed.")
    eviction, now = open_snapshots().evict_for(nbytes, dry_run=dry_run), time.time()
    if as_json:
        gone, kept = ([_row(one, now) for one in part] for part in (eviction.gone, eviction.kept))
        print_json({"dry_run": dry_run, "nbytes": eviction.nbytes, "evicted": gone, "kept": kept})
    for one in () if as_json else eviction.gone:
        done = "would go" if dry_run else "evicted"
        click.echo(f"{_what(one)}: {done}, {nbytes_text(one.nbytes)} ({one.why(now)})")
    for one in () if as_json else eviction.kept:
        click.echo(f"{_what(one)}: stays ({one.why(now)})")
    would = "would be freed" if dry_run else "freed"
    err.print(f"{counted(len(eviction.gone), 'snapshot')}, {nbytes_text(eviction.nbytes)} {would}", style="dim")
    if nbytes is not None and eviction.nbytes < nbytes:
        err.print("There is no more that may go: unpin or delete documents.", style="yellow")


def _what(one: Any) -> str:
    return f"{one.name.key.kind} {one.name.key.id}"


def _row(one: Any, now: float) -> dict[str, Any]:
    return named(one.name) | {
        "nbytes": one.nbytes, "seconds": one.seconds, "uses": one.use.n, "used_at": one.use.at,
        "usable": one.usable, "copy": one.copy, "why": one.why(now),
    }  # fmt: skip
