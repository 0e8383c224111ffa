"""`preread snapshots`."""

import asyncio
from dataclasses import asdict
from typing import Any

import click

from service.cli.evict import evict
from service.cli.output import EXIT_FAILURE, err, expected_errors, json_option, nbytes_text, print_json
from service.cli.rebuild import rebuild
from service.cli.stores import named, open_snapshots
from service.words import counted


@click.group()
def snapshots() -> None:
    """List and check stored snapshots, and make room."""


snapshots.add_command(evict)
snapshots.add_command(rebuild)


@snapshots.command("list")
@json_option
@expected_errors
def list_(as_json: bool) -> None:
    """List snapshots in every tier: of documents, their resident rows and slots, and turns, with the document's title.

    Unfinished and quarantined ones too. By what was measured: how long it takes to restore each, and to compute it.
    """
    store = open_snapshots()
    titles = _titles()
    rows: list[dict[str, Any]] = [
        row | {"title": titles.get(row["id"])} for row in (*_disk_rows(store), *_far_rows(store))
    ]
    speeds = _speeds(store, rows)
    if as_json:
        print_json({"snapshots": rows, "nbytes": sum(row["nbytes"] for row in rows), "speeds": speeds})
        return
    for row in rows:
        reason = f" ({row['reason']})" if row["reason"] else ""
        tier = "" if row["tier"] == "disk" else f" in {row['tier']}"
        size = f"{nbytes_text(row['nbytes'])}{_tokens(row)}"
        title = f' "{row["title"]}"' if row["title"] else ""
        click.echo(f"{row['kind']} {row['id']}{title}{tier}: {row['state']}{reason}, {size}{_times(row)}")
    err.print(f"{counted(len(rows), 'snapshot')}, {nbytes_text(sum(row['nbytes'] for row in rows))}", style="dim")
    for line in _speed_lines(speeds):
        err.print(line, style="dim")


@snapshots.command()
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@json_option
@expected_errors
def gc(dry_run: bool, as_json: bool) -> None:
    """Bring disk, tiers and database together: what belongs to no document is removed, what a tier lacks is sent.

    Nothing younger than an hour is removed. It may run while a server does.
    """
    from service.cli.config import read_settings
    from service.core.reconcile import reconcile_snapshots

    report = asyncio.run(reconcile_snapshots(read_settings(), dry_run=dry_run))
    if as_json:
        print_json({"dry_run": dry_run} | asdict(report))
    for orphan in () if as_json else report.orphans:
        done = "would be removed" if dry_run else "removed"
        click.echo(f"{orphan.what} in {orphan.tier}: {done} ({orphan.why}), {nbytes_text(orphan.nbytes)}")
    for tier, why in report.down.items():
        err.print(f"The {tier} tier was left out: {why}", style="yellow", markup=False)
    still = "to be" if dry_run else "still to be"
    sent = "" if dry_run else f"{report.n_sent} sent, "
    to_do = f"{sent}{report.n_to_send} {still} sent, {report.n_to_remove} {still} removed from a tier"
    err.print(f"{len(report.orphans)} of no use, {to_do}", style="dim")


@snapshots.command()
@json_option
@expected_errors
def verify(as_json: bool) -> None:
    """Read every byte of every snapshot and compare it with its checksum; exit code 1 when one is damaged.

    Nothing is changed: a damaged snapshot is set aside and built again when a question needs it.
    """
    rows = [
        named(v.name) | {"ok": v.ok, "nbytes": v.nbytes, "reason": v.reason, "detail": v.detail}
        for v in open_snapshots().verify()
    ]
    damaged = [row for row in rows if not row["ok"]]
    if as_json:
        print_json({"snapshots": rows, "damaged": len(damaged)})
    for row in () if as_json else damaged:
        click.echo(f"{row['kind']} {row['id']}: {row['reason']}: {row['detail']}")
    err.print(f"{counted(len(rows), 'snapshot')} checked, {len(damaged)} damaged", style="dim")
    if damaged:
        raise SystemExit(EXIT_FAILURE)


def _disk_rows(store: Any) -> list[dict[str, Any]]:
    return [
        named(entry.name)
        | {
            "tier": "disk", "state": entry.state, "nbytes": entry.nbytes, "n_tokens": entry.n_tokens,
            "kv_type": entry.kv_type, "created_at": entry.created_at, "reason": entry.reason,
            "n_segments": entry.n_segments,
        }
        for entry in store.entries()
    ]  # fmt: skip


def _far_rows(store: Any) -> list[dict[str, Any]]:
    """Of the tiers beyond the disk. What a snapshot's manifest says is read from there."""
    from cache_store.tiers.store import TieredStore

    return [_far_row(tier, entry) for tier, entry in store.far_entries()] if isinstance(store, TieredStore) else []


def _far_row(tier: Any, entry: Any) -> dict[str, Any]:
    from cache_store.errors import CacheStoreError
    from cache_store.stored import decode_manifest

    row = named(entry.name) | {
        "tier": tier.name, "state": "published" if entry.complete else "unfinished", "nbytes": entry.nbytes,
        "n_tokens": None, "kv_type": None, "created_at": None, "reason": None, "n_segments": None,
    }  # fmt: skip
    try:
        manifest = decode_manifest(tier.manifest(entry.name) or b"")
    except CacheStoreError:
        return row
    return row | {
        "n_tokens": manifest.n_tokens, "kv_type": str(manifest.layout.kv_type), "created_at": manifest.created_at,
        "n_segments": manifest.segments.n_segments(manifest.n_tokens),
    }  # fmt: skip


def _titles() -> dict[str, str]:
    """By ids. A list without titles is better than none."""
    from service.cli.config import read_settings
    from service.core.titles import snapshot_titles
    from service.errors import ServiceError

    try:
        return asyncio.run(snapshot_titles(read_settings()))
    except ServiceError as error:
        err.print(f"The titles are left out. {error.detail}", style="yellow", markup=False)
        return {}


def _speeds(store: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Measured speeds by tier, of prefill, and the speed above which a tier is faster than computing. Each row gets its
    two times, None where they are not known."""
    from cache_store.speeds import PREFILL

    book = store.speeds
    for row in rows:
        usable = row["state"] == "published"
        computed = usable and row["kind"] in ("document", "turn") and row["n_tokens"]
        row["restore_s"] = book.restore_s(row["tier"], row["nbytes"]) if usable else None
        row["recompute_s"] = book.recompute_s(row["n_tokens"]) if computed else None
    known = {name: book.speed(name) for name in ("disk", "redis", "object", PREFILL)}
    documents = [row for row in rows if row["recompute_s"]]
    known["break_even"] = max((row["nbytes"] / row["recompute_s"] for row in documents), default=None)
    return {name: speed for name, speed in known.items() if speed is not None}


def _times(row: dict[str, Any]) -> str:
    times = [f"{word} {row[f'{word}_s']:.2g} s" for word in ("restore", "recompute") if row[f"{word}_s"]]
    return f", {', '.join(times)}" if times else ""


def _speed_lines(speeds: dict[str, float]) -> list[str]:
    from cache_store.speeds import PREFILL

    tiers = [name for name in speeds if name not in (PREFILL, "break_even")]
    lines = [f"{name}: {nbytes_text(speeds[name])}/s" for name in tiers]
    if PREFILL in speeds:
        lines.append(f"prefill: {speeds[PREFILL]:.0f} tokens/s")
    if "break_even" in speeds:
        lines.append(f"restoring is faster than computing above {nbytes_text(speeds['break_even'])}/s")
    return lines


def _tokens(row: dict[str, Any]) -> str:
    """What the manifest says of a snapshot's length, for a line of the list."""
    if row["n_tokens"] is None:
        return ""
    unit = "rows" if row["kind"] in ("resident", "slots") else "tokens"
    cut = f" in {row['n_segments']} segments" if row["n_segments"] > 1 else ""
    return f", {row['n_tokens']} {unit}{cut}, {row['kv_type']}"
