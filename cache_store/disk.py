"""Files of the store: private modes, no symbolic links, and every change of the disk in one class.

Whoever writes takes a `Disk`, so that a test can give one that fails or dies at a chosen step.
"""

import ctypes
import errno
import os
import resource
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from cache_store.errors import StorageFailed

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN}


class NotPlain(OSError):
    """A symbolic link or a special file stands where a plain file must be."""


class Disk:
    """The operations that change the disk. Each may raise OSError."""

    def make_dir(self, path: Path) -> bool:
        """Make a directory for the owner alone; False when it is there. A symbolic link is refused."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise NotPlain(errno.ENOTDIR, "not a directory", str(path)) from None
            return False
        return True

    def make_dirs(self, base: Path, *names: str) -> Path:
        """Make directories below `base`, each durable in its parent."""
        path = base
        for name in names:
            if self.make_dir(path / name):
                self.sync_dir(path)
            path = path / name
        return path

    def create(self, path: Path, nbytes: int) -> int:
        """A new file of `nbytes` reserved bytes, open for reading and writing."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync_data(self, fd: int) -> None:
        """Make written bytes durable (and the length, not times)."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swap two directories in one step; False where the system cannot."""
        try:
            swap = ctypes.CDLL(None, use_errno=True).renameat2
        except (AttributeError, OSError):
            return False
        if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise OSError(code, os.strerror(code), str(one))

    def remove(self, path: Path) -> None:
        """Remove a file or a directory with all it holds; nothing happens when it is not there."""
        while os.path.lexists(path):
            # Where others remove it too, a file of it may be gone that was just seen: the rest still has to go, or its
            # bytes would be taken off the account twice.
            with suppress(FileNotFoundError):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    os.unlink(path)

    def remove_empty(self, path: Path) -> None:
        """Remove a directory if it holds nothing."""
        with suppress(OSError):
            os.rmdir(path)


def open_directory(base: Path, *names: str) -> int:
    """A descriptor of the directory `names` below `base`; no part below `base` may be a symbolic link."""
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        parent = fd
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=parent)
        finally:
            os.close(parent)
    return fd


def open_plain(name: str, directory_fd: int) -> tuple[int, int]:
    """Descriptor and length of a plain file opened for reading. Raises NotPlain for anything else."""
    try:
        # Without O_NONBLOCK, opening a pipe somebody left here would wait for ever.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=directory_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotPlain(error.errno, "not a plain file", name) from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise NotPlain(errno.EINVAL, "not a plain file", name)
    return fd, status.st_size


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` on; the number of bytes there were."""
    done = 0
    while done < len(buffer):
        n = os.preadv(fd, [buffer[done:]], offset + done)
        if not n:
            break
        done += n
    return done


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may go: an open snapshot holds a descriptor for each of its
    shards, and a long document has hundreds of them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Some systems state no bound and still refuse to have none.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tree_size(path: Path) -> tuple[int, int]:
    """Number and bytes of the plain files at or below `path`; links are not followed."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    if not stat.S_ISDIR(status.st_mode):
        return 1, status.st_size if stat.S_ISREG(status.st_mode) else 0
    sizes = [tree_size(path / name) for name in names_in(path)]
    return sum(n for n, _ in sizes), sum(nbytes for _, nbytes in sizes)


def names_in(path: Path) -> list[str]:
    """Sorted names in a directory; none when it is missing or not a directory of its own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    except OSError:
        return []
    try:
        return sorted(os.listdir(fd))
    except OSError:
        return []
    finally:
        os.close(fd)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it has the old text or the new one: a full disk must not leave it empty. Raises
    OSError."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        os.rename(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def is_transient(error: OSError) -> bool:
    """Whether the machine, not the file, is at fault: too many open files, no memory."""
    return error.errno in _TRANSIENT


@contextmanager
def storage_errors(doing: str) -> Generator[None]:
    """Turn an OSError into StorageFailed that says what was being done."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{doing}: {error.strerror or error}") from error
