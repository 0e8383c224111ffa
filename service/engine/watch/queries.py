"""Queries of watched heads, kept for the tails whose answers are being computed."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KeptQueries:
    """Of each watched slot the queries of every row whose logits were wanted, in order: of each row ``[n_heads, heads
    per KV head, head_dim]``."""

    def __init__(self) -> None:
        self._of_slot: dict[int, list[Tensor]] = {}

    def begin(self, slot: int) -> None:
        """Watch a slot from now on, as if nothing had been kept of it."""
        self._of_slot[slot] = []

    def end(self, slot: int) -> None:
        """Forget a slot; nothing happens when it is not watched."""
        self._of_slot.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._of_slot

    def add(self, slots: Sequence[int], queries: Tensor, counts: Sequence[int] | None = None) -> None:
        """`queries`: ``[rows, n_heads, heads per KV head, head_dim]``, kept as they are: `counts` rows of each slot,
        None for one of each."""
        of_slots = queries.split(list(counts) if counts is not None else [1] * len(slots))
        for slot, of_slot in zip(slots, of_slots, strict=True):
            if slot in self._of_slot:
                self._of_slot[slot].extend(of_slot.unbind())

    def drop(self, slot: int, n_rows: int) -> None:
        """Forget the last `n_rows` of a slot, which were cut from its tail; fewer where fewer were kept."""
        if n_rows > 0 and slot in self._of_slot:
            del self._of_slot[slot][-n_rows:]

    def last(self, slot: int, n_rows: int) -> Tensor:
        """Of the last `n_rows` rows, ``[n_heads, heads per KV head, n_rows, head_dim]``. Raises ValueError when
        fewer were kept."""
        kept = self._of_slot.get(slot, [])
        if not 0 < n_rows <= len(kept):
            raise ValueError(f"{len(kept)} rows of slot {slot} were kept, not {n_rows}")
        return torch.stack(kept[len(kept) - n_rows :], 2)
