"""A SQLite database at the head of the migrations, made once in each process and copied: this takes a tenth of the time
that they take, and they have tests of their own."""

import asyncio
import functools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from service.db.migrations import upgrade


def place(path: Path) -> None:
    """Leave such a database at `path`, unless there is one."""
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_template())


@functools.cache
def _template() -> bytes:
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as pool:
        path = Path(directory) / "a.sqlite3"
        pool.submit(lambda: asyncio.run(upgrade(f"sqlite+aiosqlite:///{path}"))).result()  # there may be a loop here
        return path.read_bytes()
