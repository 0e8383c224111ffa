"""`preread snapshots`."""

from typing import Any

import click

from service.cli.output import EXIT_FAILURE, err, expected_errors, json_option, nbytes_text, print_json


@click.group()
def snapshots() -> None:
    """List and check stored snapshots."""


@snapshots.command("list")
@json_option
@expected_errors
def list_(as_json: bool) -> None:
    """List snapshots of documents and turns: published, unfinished and quarantined."""
    rows = [
        _named(entry.name)
        | {
            "state": entry.state, "nbytes": entry.nbytes, "n_tokens": entry.n_tokens, "kv_type": entry.kv_type,
            "created_at": entry.created_at, "reason": entry.reason,
        }
        for entry in _store().entries()
    ]  # fmt: skip
    if as_json:
        print_json({"snapshots": rows, "nbytes": sum(row["nbytes"] for row in rows)})
        return
    for row in rows:
        tokens = "" if row["n_tokens"] is None else f", {row['n_tokens']} tokens, {row['kv_type']}"
        reason = f" ({row['reason']})" if row["reason"] else ""
        click.echo(f"{row['kind']} {row['id']}: {row['state']}{reason}, {nbytes_text(row['nbytes'])}{tokens}")
    err.print(f"{len(rows)} snapshots, {nbytes_text(sum(row['nbytes'] for row in rows))}", style="dim")


@snapshots.command()
@json_option
@expected_errors
def verify(as_json: bool) -> None:
    """Read every byte of every snapshot and compare it with its checksum; exit code 1 when one is damaged.

    Nothing is changed: a damaged snapshot is set aside and built again when a question needs it.
    """
    rows = [
        _named(v.name) | {"ok": v.ok, "nbytes": v.nbytes, "reason": v.reason, "detail": v.detail}
        for v in _store().verify()
    ]
    damaged = [row for row in rows if not row["ok"]]
    if as_json:
        print_json({"snapshots": rows, "damaged": len(damaged)})
    for row in () if as_json else damaged:
        click.echo(f"{row['kind']} {row['id']}: {row['reason']}: {row['detail']}")
    err.print(f"{len(rows)} snapshots checked, {len(damaged)} damaged", style="dim")
    if damaged:
        raise SystemExit(EXIT_FAILURE)


def _store() -> Any:
    from cache_store.store import SnapshotStore
    from service.cli.config import read_settings

    return SnapshotStore(read_settings().store_dir)


def _named(name: Any) -> dict[str, Any]:
    key = name.key
    return {"owner_id": key.owner_id, "kind": key.kind, "id": key.id, "fingerprint": name.fingerprint_digest}
