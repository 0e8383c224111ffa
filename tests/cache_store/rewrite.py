"""Changes a manifest as another version's writer would: its checksum stays right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from cache_store.stored import decode_manifest
from tests.cache_store.recipes import Recipe


def rewrite(root: Path, recipe: Recipe, change: Callable[[dict[str, Any]], None]) -> None:
    """Change fields of the manifest of a published snapshot."""
    path = recipe.directory(root) / "manifest.json"
    body = msgspec.json.decode(msgspec.json.encode(decode_manifest(path.read_bytes())))
    change(body)
    raw = msgspec.json.encode(body)
    path.write_bytes(b'{"xxh3":"%s","body":%s}\n' % (xxhash.xxh3_64_hexdigest(raw).encode(), raw))
