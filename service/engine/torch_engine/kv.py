"""KV of documents and of sequences in memory, preallocated, in the space attention works in.

Quantized KV types are attended to in the codec's rotated space: keys and values are stored as the Hadamard
transform of what the model computed, queries are rotated once, the output is rotated back. So restoring a
snapshot decodes integers and transforms nothing. Keys are FP32 on a CPU even under BF16 weights: scores then are
exact to FP32, at no cost in time, since small FP32 products run nearer to the memory's speed.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.torch_engine.arena import Arena, carve, carved_nbytes

if TYPE_CHECKING:
    from service.engine.torch_engine.slots import SlotRows

_ALIGN = 8


def aligned(n_tokens: int) -> int:
    """Rounded up to what attention cuts into equal parts."""
    return -(-n_tokens // _ALIGN) * _ALIGN


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Where and how KV is held: `key_dtype` and `value_dtype` on `device`."""

    layout: KVLayout
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device
    arena: Arena = field(default_factory=Arena)

    def prepare(self, capacity: int) -> None:
        """Have memory ready for a document of `capacity` tokens. On a CPU only; may be called from any thread."""
        if self.device.type == "cpu":
            self.arena.prepare(carved_nbytes(self._shape(capacity), self.key_dtype, self.value_dtype))

    def nbytes(self, n_tokens: int) -> int:
        """Bytes of a document's keys and values."""
        values = self.layout.n_layers * self.layout.n_kv_heads * self.layout.head_dim * aligned(n_tokens)
        return values * (self.key_dtype.itemsize + self.value_dtype.itemsize)

    def empty(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n_layers, n_kv_heads, capacity, head_dim]``, uninitialized."""
        shape = self._shape(capacity)
        if self.device.type != "cpu":
            return (
                torch.empty(shape, dtype=self.key_dtype, device=self.device),
                torch.empty(shape, dtype=self.value_dtype, device=self.device),
            )
        buffer = self.arena.take(carved_nbytes(shape, self.key_dtype, self.value_dtype))
        k = carve(buffer, shape, None, self.key_dtype)
        return k, carve(buffer, shape, k, self.value_dtype)

    def _shape(self, capacity: int) -> tuple[int, int, int, int]:
        return self.layout.n_layers, self.layout.n_kv_heads, capacity, self.layout.head_dim


class DocumentKV:
    """The decoded KV of one document, read by every sequence on it and written only while it is built.

    `capacity` is `n_tokens` rounded up to 8, so that attention can cut the tokens into equal parts; what is
    beyond `n_tokens` is masked. `prefix`: where its chunks begin, behind the sinks of a segment. The first `n_turned`
    layers are laid out for products of a few rows. `slots`: rows that each head has for itself.
    """

    def __init__(self, memory: KVMemory, capacity_tokens: int) -> None:
        self.memory = memory
        self.capacity_tokens = capacity_tokens
        self.capacity = aligned(capacity_tokens)
        self._k, self._v = memory.empty(self.capacity)
        self.n_turned = 0
        for x in (self._k, self._v):
            x[:, :, capacity_tokens:].zero_()
        self.n_tokens = 0
        self.prefix = 0
        self.slots: SlotRows | None = None
        self._finite = False
        self._positions: tuple[int | None, int | None] = (None, None)

    @property
    def k(self) -> Tensor:
        """Keys ``[n_layers, n_kv_heads, capacity, head_dim]``, to read and to write; turned layers are turned back."""
        self._turn_back()
        return self._k

    @property
    def v(self) -> Tensor:
        """Values, as `k`."""
        self._turn_back()
        return self._v

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they lie in memory: as `k` and `v` from layer `n_turned` on."""
        return self._k, self._v

    @property
    def can_turn(self) -> bool:
        """Whether products with turned layers are the faster ones: in FP32 on a CPU."""
        return self._k.device.type == "cpu" and self._k.dtype is self._v.dtype is torch.float32

    def turn(self, n_layers: int) -> None:
        """Lay the next `n_layers` of keys and values out feature by feature, ``[n_kv_heads, head_dim, capacity]``, in
        their own memory. A product of a few rows reads them so a third to a half faster; filling them and the flash
        kernel want them as they were."""
        end = min(self.n_turned + n_layers, len(self._k))
        for layer in range(self.n_turned, end):
            for head in (*self._k[layer], *self._v[layer]):
                head.view(head.shape[::-1]).copy_(head.clone().t())
        self.n_turned = end

    def turned(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n_kv_heads, head_dim, capacity]`` of a layer below `n_turned`."""
        k, v = self._k[layer], self._v[layer]
        shape = (k.shape[0], k.shape[2], k.shape[1])
        return k.view(shape), v.view(shape)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n_kv_heads, capacity, head_dim]`` of a layer, to read: copies of a turned one."""
        if layer < self.n_turned:
            k, v = (x.transpose(1, 2).contiguous() for x in self.turned(layer))
            return k, v
        return self._k[layer], self._v[layer]

    def free(self) -> None:
        """Give the memory back."""
        self._k, self._v = self.memory.empty(0)
        self.slots = None
        self.place(0)
        self.n_turned = self.capacity = self.capacity_tokens = 0

    def _turn_back(self) -> None:
        for layer in range(self.n_turned):
            for head in (*self._k[layer], *self._v[layer]):
                head.copy_(head.view(head.shape[::-1]).clone().t())
        self.n_turned = 0

    def place(self, n_tokens: int, next_position: int | None = None, last_position: int | None = None) -> None:
        """Declare rows present; without positions they are consecutive tokens from position 0."""
        self.n_tokens = n_tokens
        self._positions = next_position, last_position

    def clear_rest(self) -> None:
        """Make sure, before rows attend to a document that is not full, that what it does not hold is finite: masked
        values count zero times, which leaves NaN of memory that nobody wrote yet."""
        if not self._finite and not self.complete:
            self.v[:, :, self.n_tokens :].zero_()
        self._finite = True

    @property
    def next_position(self) -> int:
        """Where the first token behind the document stands."""
        given = self._positions[0]
        return self.n_tokens if given is None else given

    @property
    def last_position(self) -> int:
        """Where its last token stands."""
        given = self._positions[1]
        return self.next_position - 1 if given is None else given

    @property
    def consecutive(self) -> bool:
        """Whether its rows are tokens one after the other, so that it can be prefilled further."""
        return self._positions == (None, None)

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes + (0 if self.slots is None else self.slots.nbytes)

    @property
    def complete(self) -> bool:
        return self.n_tokens == self.capacity_tokens


class Tail:
    """The private KV of one sequence: its turns after the document, and rows of the document fetched for one answer.

    Its rows are ``[turns | fetched | new]``. `first_fetched` and `n_fetched` say which are fetched.
    """

    __slots__ = ("first_fetched", "k", "length", "n_fetched", "v")

    def __init__(self, memory: KVMemory, capacity: int) -> None:
        self.k, self.v = memory.empty(capacity)
        self.clear()

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    @property
    def n_own(self) -> int:
        """Tokens that the sequence itself added: what counts for the position of the next one."""
        return self.length - self.n_fetched

    def clear(self) -> None:
        self.length = self.first_fetched = self.n_fetched = 0

    def cut(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` rows."""
        self.length = min(self.length, n_tokens)
        self.n_fetched = min(self.n_fetched, max(0, self.length - self.first_fetched))

    def mark_fetched(self, n_tokens: int) -> None:
        """Count the next `n_tokens` rows as fetched. Raises ValueError when there are such rows already."""
        if self.n_fetched:
            raise ValueError("the tail has fetched rows already")
        self.first_fetched, self.n_fetched = self.length, n_tokens

    def drop_fetched(self) -> None:
        """Take the fetched rows out; those behind them move up."""
        first, last = self.first_fetched, self.first_fetched + self.n_fetched
        if self.n_fetched:
            for x in (self.k, self.v):
                x[:, :, first : self.n_own] = x[:, :, last : self.length].clone()
        self.length, self.n_fetched = self.n_own, 0


class TailPool:
    """A fixed number of slots for tails; a freed slot's memory is used again by the next sequence."""

    def __init__(self, memory: KVMemory, n_slots: int, capacity: int) -> None:
        self._memory = memory
        self._capacity = capacity
        self._tails: list[Tail | None] = [None] * n_slots
        self._free = list(range(n_slots - 1, -1, -1))

    def take(self) -> int:
        """A free slot, emptied. Raises RuntimeError when there is none."""
        if not self._free:
            raise RuntimeError("no free slot for a sequence")
        slot = self._free[-1]
        tail = self._tails[slot]
        if tail is None:  # for which there may be no memory
            tail = self._tails[slot] = Tail(self._memory, self._capacity)
        self._free.pop()
        tail.clear()
        return slot

    def give_back(self, slot: int) -> None:
        if slot in self._free:
            raise RuntimeError(f"slot {slot} was freed twice")
        self._free.append(slot)

    def __getitem__(self, slot: int) -> Tail:
        tail = self._tails[slot]
        if tail is None or slot in self._free:
            raise RuntimeError(f"slot {slot} is not in use")
        return tail

    @property
    def used(self) -> int:
        return len(self._tails) - len(self._free)
