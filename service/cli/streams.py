"""Standard output and error of a command: closed ones, full disks and readers that went away end it with a sentence."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIPE_CLOSED = 141
"""Exit code of a program whose reader went away, as a shell shows it: 128 and SIGPIPE."""


class OutputLost(Exception):
    """Standard output takes no more."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"Standard output cannot be written: {error.strerror}.")
        self.exit_code = PIPE_CLOSED if error.errno == errno.EPIPE else 1


class Printed(io.TextIOWrapper):
    """Standard output. Raises OutputLost, so that nobody takes it for an error of a file; what its encoding lacks
    (bytes of a name that are no text among it) is replaced."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputLost(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputLost(error) from None


def open_closed() -> None:
    """Open descriptors that the caller closed: the next file would get their numbers, and be printed into. Writing to
    standard output then fails, as it should."""
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8")
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace")


@contextmanager
def guarded_output() -> Iterator[None]:
    """Standard output as a `Printed`. Raises OutputLost also for what could only be written in the end."""
    open_closed()
    plain = sys.stdout
    through = getattr(plain, "write_through", False)
    out = Printed(
        plain.buffer, plain.encoding, "replace", line_buffering=bool(plain.line_buffering), write_through=through
    )
    sys.stdout = out
    try:
        yield
        out.flush()
    except OutputLost:
        _forget(out)
        raise
    finally:
        sys.stdout = plain
        with suppress(OutputLost):
            out.detach()


def _forget(out: Printed) -> None:
    """What is still held goes nowhere: the interpreter would try it again as it ends, and complain."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
