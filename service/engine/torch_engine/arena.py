"""Memory for a document's KV whose pages are there before it is needed.

New memory costs a page fault for every 4 KiB that is written first, about a third of a restore. A spare buffer is made
in a thread while the engine is idle, of huge pages where the system has them, and the next document that fits takes it.
"""

import ctypes
import mmap
import threading

import torch
from torch import Tensor

_ALIGN = 64
_PIECE_NBYTES = 16 << 20  # populated at a time, so that other threads that map memory wait little
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Gives buffers on the CPU; holds at most one spare."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: mmap.mmap | None = None

    @property
    def spare_nbytes(self) -> int:
        """Bytes held for the next document."""
        spare = self._spare
        return len(spare) if spare is not None else 0

    def prepare(self, nbytes: int) -> None:
        """Make a spare of `nbytes`, from any thread; an equal or larger one stays."""
        if self.spare_nbytes >= nbytes or nbytes <= 0:
            return
        spare = _populated(nbytes)
        with self._lock:
            self._spare = spare

    def take(self, nbytes: int) -> Tensor:
        """Uninitialized uint8 memory: the spare when it fits and would not be mostly wasted, else new memory."""
        with self._lock:
            spare = self._spare
            if spare is None or not nbytes <= len(spare) <= 2 * nbytes:
                return torch.empty(nbytes, dtype=torch.uint8)
            self._spare = None
        return torch.frombuffer(spare, dtype=torch.uint8)[:nbytes]


def carve(buffer: Tensor, shape: tuple[int, ...], first: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A tensor of `shape` in `buffer`, behind `first` (itself carved from its start) or at its start."""
    at = 0 if first is None else -(-first.nbytes // _ALIGN) * _ALIGN
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[at : at + nbytes].view(dtype).view(shape)


def carved_nbytes(shape: tuple[int, ...], *dtypes: torch.dtype) -> int:
    """Bytes of a buffer for one tensor of `shape` in each dtype."""
    values = torch.Size(shape).numel()
    return sum(-(-values * dtype.itemsize // _ALIGN) * _ALIGN for dtype in dtypes)


def _populated(nbytes: int) -> mmap.mmap:
    """Private memory, every page present. Where the system cannot do it ahead, its pages come when they are used."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, nbytes, _PIECE_NBYTES):
        # Called so, it lets other threads of this process run; mmap's own method holds the interpreter.
        piece = ctypes.c_size_t(min(_PIECE_NBYTES, nbytes - at))
        if _libc.madvise(ctypes.c_void_p(address + at), piece, _MADV_POPULATE_WRITE):
            break
    return memory
