"""Files that are written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def partial_file(to: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file beside `to` that takes its place at the end of the block, and is gone if that fails. What is no file, as a
    pipe or /dev/stdout, is written to as it is. Raises OSError."""
    if Path(to).exists() and not Path(to).is_file():
        with Path(to).open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(to))  # a link stays one
    descriptor, name = tempfile.mkstemp(prefix=".preread-", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
