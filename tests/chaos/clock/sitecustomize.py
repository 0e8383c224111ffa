"""Python imports this at its start where it is on the path: then the clock of the world can be moved in that process.

`TEST_CLOCK` names a file with the seconds to add, as a double. Monotonic clocks stay as they are, as they do where the
world's clock is set anew, and so do times of files.
"""

import mmap
import os
import struct
import time


def _shift(path: str) -> None:
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real, real_ns, unpack = time.time, time.time_ns, struct.Struct("d").unpack_from
    time.time = lambda: real() + unpack(memory)[0]
    time.time_ns = lambda: real_ns() + int(unpack(memory)[0] * 1e9)


if _path := os.environ.get("TEST_CLOCK"):
    _shift(_path)
