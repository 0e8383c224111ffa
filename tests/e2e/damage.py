"""Ways in which a stored snapshot gets damaged, each with the reason that its document's next answer must give."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

Apply = Callable[[Path, Path], object]


@dataclass(frozen=True, slots=True)
class Damage:
    """`apply` gets the snapshot's directory, and that of another document. `large` needs two shards."""

    name: str
    reason: str
    apply: Apply
    large: bool = False


def flip(path: Path, at: float = 0.5) -> None:
    """Turn one bit of a file, at a share of its length."""
    offset = int(at * (path.stat().st_size - 1))
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def shard(directory: Path, index: int = 0) -> Path:
    return directory / f"shard-{index:04d}.safetensors"


def manifest(directory: Path) -> Path:
    return directory / "manifest.json"


def rewrite(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a right checksum, as another version's writer would."""
    body = msgspec.json.decode(manifest(directory).read_bytes())["body"]
    change(body)
    raw = msgspec.json.encode(body)
    manifest(directory).write_bytes(b'{"xxh3":"%s","body":%s}\n' % (xxhash.xxh3_64_hexdigest(raw).encode(), raw))


def swap(directory: Path) -> None:
    aside = directory / "aside"
    shard(directory, 0).rename(aside)
    shard(directory, 1).rename(shard(directory, 0))
    aside.rename(shard(directory, 1))


def link(path: Path) -> None:
    """Leave the very bytes, behind a symbolic link."""
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def empty_all(directory: Path) -> None:
    for path in directory.iterdir():
        os.truncate(path, 0)


FEW = [
    Damage("byte flipped in the shard", "checksum", lambda d, _: flip(shard(d))),
    Damage("byte flipped in the manifest", "checksum", lambda d, _: flip(manifest(d))),
    Damage("shard truncated", "truncated", lambda d, _: os.truncate(shard(d), shard(d).stat().st_size // 2)),
    Damage("shard missing", "truncated", lambda d, _: shard(d).unlink()),
    Damage("shard of another document", "checksum", lambda d, other: shutil.copyfile(shard(other), shard(d))),
    Damage("newer format version", "version", lambda d, _: rewrite(d, lambda body: body.update(format_version=2))),
    Damage("whole directory missing", "absent", lambda d, _: shutil.rmtree(d)),
]
MANY = [
    *FEW,
    Damage("byte flipped in the shard's header", "checksum", lambda d, _: flip(shard(d), 0.0)),
    Damage("byte flipped at the shard's end", "checksum", lambda d, _: flip(shard(d), 1.0)),
    Damage("byte flipped in the first of two shards", "checksum", lambda d, _: flip(shard(d, 0)), large=True),
    Damage("byte flipped in the second of two shards", "checksum", lambda d, _: flip(shard(d, 1)), large=True),
    Damage("shards swapped", "checksum", lambda d, _: swap(d), large=True),
    Damage("manifest missing", "truncated", lambda d, _: manifest(d).unlink()),
    Damage("manifest of 1 GB", "checksum", lambda d, _: os.truncate(manifest(d), 1 << 30)),
    Damage("manifest of another document", "checksum", lambda d, o: shutil.copyfile(manifest(o), manifest(d))),
    Damage("files empty", "truncated", lambda d, _: empty_all(d)),
    Damage("shard a symbolic link", "checksum", lambda d, _: link(shard(d))),
    Damage("manifest a symbolic link", "checksum", lambda d, _: link(manifest(d))),
    Damage("other weights", "fingerprint", lambda d, _: rewrite(d, lambda b: b["fingerprint"].update(weights="x"))),
]
