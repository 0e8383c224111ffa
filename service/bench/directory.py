"""The directory of a run's snapshots, and those that killed runs left behind."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from service.held import held_directory

PREFIX = ".bench-"


@contextmanager
def own_directory(data_dir: Path, tell: Callable[[str], object]) -> Iterator[Path]:
    """A directory that is removed at the end; `tell` is told why it could not be. Left-overs that no process holds are
    removed first. Raises OSError."""
    data_dir.mkdir(parents=True, exist_ok=True)
    directory, lock = held_directory(data_dir, PREFIX)
    try:
        yield directory
    finally:
        try:
            shutil.rmtree(directory)
        except OSError as error:  # takes no figure with it
            tell(f"{directory} could not be removed: {error}")
        os.close(lock)
