"""Private tails of sequences on the card: slots of a fixed size, in the compute dtype and the rotated space."""

import torch
from torch import Tensor

from cache_store.layout import KVLayout


class Tails:
    """`n_slots` tails of `capacity` tokens. `k[layer]`, `v[layer]`: ``[n_slots, n_kv_heads, capacity, head_dim]``.

    A tail may hold one run of *fetched* tokens: rows of the document, which take no positions of the tail's own.
    """

    def __init__(self, layout: KVLayout, n_slots: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.n_slots = n_slots
        self.capacity = capacity
        shape = (layout.n_layers, n_slots, layout.n_kv_heads, capacity, layout.head_dim)
        # Zeros: kernels read whole tiles and mask what they compute, and 0 times NaN is NaN.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._lengths: dict[int, int] = {}
        self._fetched: dict[int, tuple[int, int]] = {}
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
        self._fetched.pop(slot, None)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens in a slot. Raises RuntimeError for one that is not in use."""
        try:
            return self._lengths[slot]
        except KeyError:
            raise RuntimeError(f"slot {slot} is not in use") from None

    def fetched(self, slot: int) -> tuple[int, int]:
        """The run of fetched tokens as [first, last); an empty one at 0 where there is none."""
        return self._fetched.get(slot, (0, 0))

    def has_fetched(self, slot: int) -> bool:
        return slot in self._fetched

    def own_length(self, slot: int) -> int:
        """Tokens in a slot that take positions of their own: all but the fetched ones."""
        first, last = self.fetched(slot)
        return self.length(slot) - (last - first)

    def mark_fetched(self, slot: int, n_tokens: int) -> None:
        """Call the last `n_tokens` tokens fetched."""
        if n_tokens:
            self._fetched[slot] = self.length(slot) - n_tokens, self.length(slot)

    def drop_fetched(self, slot: int) -> None:
        """Move what stands behind the fetched tokens up to their place; nothing happens without any."""
        first, last = self.fetched(slot)
        end = self.length(slot)
        if first == last:
            return
        for layer in range(len(self.k)):  # one by one: source and target overlap, so each needs a copy
            for tail in (self.k[layer, slot], self.v[layer, slot]):
                tail[:, first : first + end - last] = tail[:, last:end].clone()
        self._lengths[slot] = end - (last - first)
        del self._fetched[slot]

    def truncate(self, slot: int, n_tokens: int) -> None:
        length = self._lengths[slot] = min(self.length(slot), n_tokens)
        first, last = self._fetched.pop(slot, (0, 0))
        if first < length and first < last:
            self._fetched[slot] = first, min(last, length)

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
