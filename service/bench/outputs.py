"""Files that a run is written into: tried before anything is measured, and written in one piece."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from service.errors import Invalid


class Output:
    """A file that will be written, or stays as it was. Folders that were made for it go with it when it is not
    written. Entering raises Invalid where it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))  # a link stays one
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        try:
            self._try()
        except OSError as error:
            self.close()
            raise Invalid(f"{self.path} cannot be written ({error.strerror or error}): name another file.") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def write(self, content: bytes) -> None:
        """Raises OSError; an earlier file of the same name is there until all of this one is."""
        aside = self._aside()
        try:
            with open(aside, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                aside.chmod(stat.S_IMODE(self._target.stat().st_mode))
            aside.replace(self._target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Remove the folders that were made for it and are empty."""
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def _try(self) -> None:
        missing = [folder for folder in self._target.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.insert(0, folder)
        if self._target.exists():
            self._check(self._target)
        aside = self._aside()
        aside.touch(exist_ok=False)
        aside.unlink()

    def _check(self, target: Path) -> None:
        if not target.is_file():
            raise OSError("it is no regular file")
        if not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")

    def _aside(self) -> Path:
        return self._target.with_name(f".preread-bench-{secrets.token_hex(8)}")


def same_file(one: Path, other: Path) -> bool:
    """Whether two names are those of one file, which need not be there."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False
