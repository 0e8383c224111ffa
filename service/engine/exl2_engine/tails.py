"""Private tails of sequences on the card: slots of a fixed size, in the compute dtype and the rotated space."""

import torch
from torch import Tensor

from cache_store.layout import KVLayout


class Tails:
    """`n_slots` tails of `capacity` tokens. `k[layer]`, `v[layer]`: ``[n_slots, n_kv_heads, capacity, head_dim]``."""

    def __init__(self, layout: KVLayout, n_slots: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.n_slots = n_slots
        self.capacity = capacity
        shape = (layout.n_layers, n_slots, layout.n_kv_heads, capacity, layout.head_dim)
        # Zeros: kernels read whole tiles and mask what they compute, and 0 times NaN is NaN.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._lengths: dict[int, int] = {}
        self._free = list(range(n_slots - 1, -1, -1))

    @property
    def used(self) -> int:
        """Slots that hold a sequence's tail."""
        return len(self._lengths)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def take(self) -> int:
        """A free slot, emptied. Raises RuntimeError when there is none."""
        if not self._free:
            raise RuntimeError("no free slot for a sequence")
        slot = self._free.pop()
        self._lengths[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        """Raises RuntimeError for a slot that is not in use."""
        self.length(slot)
        del self._lengths[slot]
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens in a slot. Raises RuntimeError for one that is not in use."""
        try:
            return self._lengths[slot]
        except KeyError:
            raise RuntimeError(f"slot {slot} is not in use") from None

    def truncate(self, slot: int, n_tokens: int) -> None:
        self._lengths[slot] = min(self.length(slot), n_tokens)

    def extend(self, slot: int, n_tokens: int) -> None:
        """Count `n_tokens` more tokens, written by the caller."""
        self._lengths[slot] = self.check_room(slot, n_tokens)

    def check_room(self, slot: int, n_tokens: int) -> int:
        """The length with `n_tokens` more. Raises ValueError when they do not fit."""
        length = self.length(slot)
        if length + n_tokens > self.capacity:
            raise ValueError(f"{n_tokens} rows do not fit a tail of {self.capacity} with {length} in use")
        return length + n_tokens

    def tokens(self, layer: int, slot: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Views ``[n_kv_heads, last - first, head_dim]`` of one layer's keys and values."""
        return self.k[layer, slot, :, first:last], self.v[layer, slot, :, first:last]
