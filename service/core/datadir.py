"""The data directory: private folders, and who may be in it at a time."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from service.errors import Conflict, StorageFull
from service.settings import Settings


def prepare(settings: Settings) -> None:
    """Make the folders the service writes to, readable by this user only; those with documents also where they are
    there already, as after a restore."""
    for path in (settings.data_dir, settings.files_dir, settings.store_dir, settings.models_dir):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (settings.files_dir, settings.store_dir):
        with suppress(OSError):  # one that belongs to another user stays as it is
            path.chmod(0o700)


def lock(data_dir: Path, what: str = "server", *, shared: bool = False) -> IO[bytes]:
    """Hold the directory until the file is closed. Raises Conflict when another server, or `what` else, has it. Those
    that hold it `shared` can do so at the same time."""
    file = os.fdopen(os.open(data_dir / f"{what}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), "r+b")
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Conflict(
            f"Another Preread {what} is using {data_dir}: stop it, or set PREREAD_DATA_DIR to another one.",
            code="data_dir_in_use",
        ) from None
    return file


def check_free(settings: Settings, nbytes: int = 0) -> None:
    """Raises StorageFull when `nbytes` more would leave less free disk than the floor."""
    free = shutil.disk_usage(settings.data_dir).free
    if free - nbytes < settings.free_floor_bytes:
        raise StorageFull(
            f"There are {free:,} bytes free, {nbytes:,} are needed and {settings.free_floor_bytes:,} stay "
            "free: delete documents or free some space, then try again."
        )
