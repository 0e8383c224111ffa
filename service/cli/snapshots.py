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
    """List snapshots of documents, their resident rows, and turns: published, unfinished and quarantined."""
    rows = [
        _named(entry.name)
        | {
            "state": entry.state, "nbytes": entry.nbytes, "n_tokens": entry.n_tokens, "kv_type": entry.kv_type,
            "created_at": entry.created_at, "reason": entry.reason, "n_segments": entry.n_segments,
        }
        for entry in _store().entries()
    ]  # fmt: skip
    if as_json:
        print_json({"snapshots": rows, "nbytes": sum(row["nbytes"] for row in rows)})
        return
    for row in rows:
        reason = f" ({row['reason']})" if row["reason"] else ""
        click.echo(f"{row['kind']} {row['id']}: {row['state']}{reason}, {nbytes_text(row['nbytes'])}{_tokens(row)}")
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


def _tokens(row: dict[str, Any]) -> str:
    """What the manifest says of a snapshot's length, for a line of the list."""
    if row["n_tokens"] is None:
        return ""
    unit = "rows" if row["kind"] in ("resident", "slots") else "tokens"
    cut = f" in {row['n_segments']} segments" if row["n_segments"] > 1 else ""
    return f", {row['n_tokens']} {unit}{cut}, {row['kv_type']}"


def _store() -> Any:
    from cache_store.store import SnapshotStore
    from service.cli.config import read_settings

    return SnapshotStore(read_settings().store_dir)


def _named(name: Any) -> dict[str, Any]:
    key = name.key
    return {"owner_id": key.owner_id, "kind": key.kind, "id": key.id, "fingerprint": name.fingerprint_digest}
