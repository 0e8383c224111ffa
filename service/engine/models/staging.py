"""A directory that becomes visible at once, when it is finished."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.engine.models.errors import NameTaken
from service.held import held_directory

_PREFIX = ".import-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged(models_dir: Path, name: str, *, replace: bool) -> Iterator[Path]:
    """A hidden directory that is renamed to ``models_dir/name`` when the block ends without an error.

    It is durable when that happens. Any error removes it; what a killed process left is removed by the next
    call. Raises NameTaken when there is such a model and `replace` is false.
    """
    models_dir.mkdir(parents=True, exist_ok=True)
    _refuse_taken(models_dir / name, replace)
    directory, lock = held_directory(models_dir, _PREFIX)
    try:
        yield directory
        directory.chmod(0o755)
        _sync(directory)
        _refuse_taken(models_dir / name, replace)
        _publish(directory, models_dir / name)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _refuse_taken(target: Path, replace: bool) -> None:
    if target.exists() and not replace:
        raise NameTaken(
            f"there is a model {target.name} in {target.parent} already: give it another name, or --replace it"
        )


def _sync(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(directory: Path, target: Path) -> None:
    if target.exists():
        _exchange(directory, target)
        shutil.rmtree(directory, ignore_errors=True)
    else:
        directory.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories; at once where the system can (Linux renameat2), else by three renames."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap and swap(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE) == 0:
        return
    aside = one.with_name(f"{one.name}-aside")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)
