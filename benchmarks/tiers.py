"""How fast snapshots come back from the tiers beyond the disk: a real Redis, and an object store.

    python -m benchmarks.tiers [--mib 1024] [--object-url file:///tmp/x] [--json FILE]

From Redis: bringing a snapshot (every record checked, its files on the local disk, open for reading) against plain GETs
of the same number of bytes in values of the same length, over one connection into memory that is used again, which is
the least that any client does; both several times in turn, the medians are compared. The values are those of the very
snapshot. redis-server (and what --object-url names) must be there. The machine's memory must hold about three times the
snapshot.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from redis import Redis

from cache_store.disk import tree_size
from cache_store.fingerprint import Fingerprint
from cache_store.keys import SnapshotKey
from cache_store.layout import KVLayout, KVType
from cache_store.tiers.object import ObjectTier
from cache_store.tiers.redis import PREFIX, RedisTier
from cache_store.tiers.redis_wire import read_value
from cache_store.tiers.store import TieredStore
from cache_store.tiers.tier import BlobTier

LAYOUT = KVLayout(n_layers=32, n_kv_heads=8, head_dim=128, kv_type=KVType.K8V4)
"""Of an 8B model."""
FINGERPRINT = Fingerprint(*["bench"] * 9)
KEY = SnapshotKey("bench", "document", "doc")
REPEATS = 5
MIB = 1 << 20


def build(store: TieredStore, mib: int) -> int:
    """A snapshot of random bytes; its bytes."""
    n_tokens = mib * MIB // LAYOUT.bytes_per_token
    rng = np.random.default_rng(0)
    record = rng.bytes(LAYOUT.record_nbytes(LAYOUT.block_tokens))
    with store.begin(KEY, FINGERPRINT, LAYOUT, rng.integers(0, 1 << 17, n_tokens).tolist()) as builder:
        for length in LAYOUT.block_lengths(n_tokens):
            builder.append([record[: LAYOUT.record_nbytes(length)]] * LAYOUT.n_layers)
        return builder.publish().nbytes


def bring(root: Path, tiers: list[BlobTier], *, read: bool) -> float:
    """Seconds to have the snapshot on an empty disk and open; with `read` until all of it was read from there too."""
    store = TieredStore(root, tiers, uploads=False)
    started = time.perf_counter()
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        assert reader.source == tiers[0].name
        if read:
            reader.verify_all()
    seconds = time.perf_counter() - started
    store.close()
    shutil.rmtree(root)
    return seconds


def raw_gets(port: int, n_values: int, nbytes: int) -> float:
    """Seconds of plain GETs of values of this length."""
    connection = Redis(port=port).connection_pool.get_connection()
    memory = np.empty(nbytes, np.uint8).data
    started = time.perf_counter()
    for i in range(n_values):
        assert read_value(connection, memory, "GET", f"raw:{i}") == nbytes
    seconds = time.perf_counter() - started
    connection.disconnect()
    return seconds


def copy_values(port: int) -> tuple[int, int]:
    """The snapshot's whole shards once more, each a key of its own: their number and length."""
    client = Redis(port=port)
    key = PREFIX + "bench~document~doc"
    fields = sorted((f for f in client.hkeys(key) if b"/" in f), key=lambda f: int(f.split(b"/")[1]))
    lengths = [client.hstrlen(key, field.decode()) for field in fields]
    whole = [field for field, n in zip(fields, lengths, strict=True) if n == max(lengths)]
    for i, field in enumerate(whole):
        client.set(f"raw:{i}", client.hget(key, field.decode()))
    client.close()
    return len(whole), max(lengths)


def start_redis(directory: Path) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        try:
            Redis(port=port).ping()
            return process, port
        except OSError:
            time.sleep(0.05)


def measure_redis(root: Path, mib: int) -> dict[str, float]:
    process, port = start_redis(root)
    try:
        tier = RedisTier(f"redis://127.0.0.1:{port}/0", timeout_s=30)
        nbytes, sent = fill(root, tier, mib)
        n_values, value_nbytes = copy_values(port)
        raw, brought, through = [], [], []
        for _ in range(REPEATS):
            raw.append(n_values * value_nbytes / raw_gets(port, n_values, value_nbytes))
            brought.append(nbytes / bring(root / "there", [tier], read=False))
            through.append(nbytes / bring(root / "there", [tier], read=True))
    finally:
        process.kill()
        process.wait()
    result = {"nbytes": nbytes, "sent": sent, "value_nbytes": value_nbytes}
    for name, speeds in (("raw_gets", raw), ("brought", brought), ("brought_and_read", through)):
        result |= {name: statistics.median(speeds), f"{name}_min": min(speeds), f"{name}_max": max(speeds)}
    return result | {"share_of_raw": result["brought"] / result["raw_gets"]}


def measure_object(root: Path, url: str, mib: int) -> dict[str, float]:
    tier = ObjectTier(url)
    nbytes, sent = fill(root, tier, mib)
    brought = [nbytes / bring(root / "there", [tier], read=False) for _ in range(REPEATS)]
    tier.remove(KEY)
    return {"nbytes": nbytes, "sent": sent, "brought": statistics.median(brought)}


def fill(root: Path, tier: BlobTier, mib: int) -> tuple[int, float]:
    """Build a snapshot and send it; its bytes, and the speed of sending."""
    store = TieredStore(root / "here", [tier], uploads=False)
    build(store, mib)
    nbytes = tree_size(root / "here" / "snapshots")[1]
    started = time.perf_counter()
    assert store.uploader.send_noted() == 0
    seconds = time.perf_counter() - started
    shutil.rmtree(root / "here")
    return nbytes, nbytes / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--object-url", default="")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        root = Path(name)
        url = arguments.object_url or f"file://{root}/objects"
        results = {"redis": measure_redis(root, arguments.mib), "object": measure_object(root, url, arguments.mib)}
    for tier, result in results.items():
        print(tier)
        for what, value in result.items():
            shown = (
                f"{value:.2f}" if what == "share_of_raw" else f"{value / MIB:.0f} MiB{'' if 'nbytes' in what else '/s'}"
            )
            print(f"  {what}: {shown}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
