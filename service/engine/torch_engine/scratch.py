"""Memory that steps compute in, kept from one to the next."""

import math

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow and are never given back; one thread uses them.

    Scores over a long document are larger than what the allocator keeps at hand: memory taken anew for every layer
    costs a page fault for each 4 KiB, more time than the softmax over them.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of `shape` in the buffer `name`, uninitialized; valid until the name is taken again."""
        n = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < n or held.dtype is not dtype or held.device != device:
            held = self._held[name] = torch.empty(n, dtype=dtype, device=device)
        return held[:n].view(shape)
