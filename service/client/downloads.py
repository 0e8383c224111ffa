"""Files that are written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def partial_file(to: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file beside `to` that takes its place at the end of the block, and is gone if that fails. Raises OSError."""
    target = Path(to)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
