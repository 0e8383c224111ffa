"""A clock of the world that can be moved in one process and its children: `clock/sitecustomize.py` reads it there."""

import os
import struct
from pathlib import Path

from tests.e2e.server import ROOT


class MovableClock:
    """`environment` is what a process needs to go by it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(struct.pack("d", 0.0))
        here = Path(__file__).with_name("clock")
        self.environment = {"TEST_CLOCK": str(path), "PYTHONPATH": os.pathsep.join((str(here), str(ROOT)))}

    def set(self, seconds: float) -> None:
        """How far it is ahead of this machine's; in place, because the processes have the file mapped."""
        with self._path.open("r+b") as file:
            file.write(struct.pack("d", seconds))
