"""The form of a memory plan, the same for every engine: named lines in bytes, and what is left for documents.

Nothing here imports torch, so that a plan can be made where no model is loaded.
"""

from collections.abc import Collection
from dataclasses import dataclass

from service.engine.models.errors import ModelError

GIB = 1 << 30
_DRAFT = "draft model: "
_PARTS = {"load": "weights", "file": "copies of weights", "tails": "tails", "work": "its steps"}
"""Phases of a second model's lines, and what they are called beside the first one's."""


class MemoryPlanRefused(ModelError):
    """The model, or a context of the wanted length, does not fit; the message has the plan."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Free and total bytes: `torch.cuda.mem_get_info` with the context of this process already made, or those of a
    machine's memory."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Line:
    """One entry. `phase`: when it appears: `before`, `load`, `tails`, `pool`, `work`, `never` (the reserve), or `file`
    (pages of files, which the system takes back when others need them)."""

    name: str
    nbytes: int
    phase: str


@dataclass(frozen=True, slots=True)
class Beside:
    """A second model in the same memory: its lines without documents, and bytes of a block of its documents."""

    lines: tuple[Line, ...] = ()
    block_nbytes: int = 0


ALONE = Beside()


@dataclass(frozen=True, slots=True)
class Ledger:
    """The plan. `pool_blocks` blocks of `block_nbytes` (over all layers) hold documents' KV; `place` is what their
    memory is called."""

    lines: tuple[Line, ...]
    memory: CardMemory
    pool_blocks: int
    block_nbytes: int
    block_tokens: int
    place: str = "card"

    def nbytes(self, *phases: str) -> int:
        """Bytes of the lines of these phases."""
        return sum(line.nbytes for line in self.lines if line.phase in phases)

    @property
    def announced_nbytes(self) -> int:
        """What this process will use at its peak, beside the context it had when the plan was made."""
        return self.nbytes("load", "tails", "pool", "work", "file")

    @property
    def overdrawn_nbytes(self) -> int:
        """By how much the lines without documents exceed the memory; below 0 when they leave something."""
        return self.nbytes("before", "load", "tails", "work", "never") - self.memory.total

    @property
    def pool_tokens(self) -> int:
        return self.pool_blocks * self.block_tokens

    @property
    def has_draft(self) -> bool:
        """Whether a draft model is in it."""
        return any(line.name.startswith(_DRAFT) for line in self.lines)

    def beside(self, shared: Collection[str], more_block_nbytes: int = 0) -> Beside:
        """This plan as that of a draft model beside another: its lines summed up by phase. Those named in `shared` are
        there once for both. `more_block_nbytes`: what a block takes beside its KV."""
        own = [line for line in self.lines if line.name not in shared]
        sums = {phase: sum(line.nbytes for line in own if line.phase == phase) for phase in _PARTS}
        lines = tuple(Line(_DRAFT + _PARTS[phase], nbytes, phase) for phase, nbytes in sums.items() if nbytes)
        return Beside(lines, self.block_nbytes + more_block_nbytes)

    def table(self) -> str:
        """The lines as text, in GiB."""
        rows = [(line.name, f"{line.nbytes / GIB:9.3f} GiB") for line in self.lines]
        rows.append((self.place, f"{self.memory.total / GIB:9.3f} GiB"))
        width = max(len(name) for name, _ in rows)
        text = "\n".join(f"  {name:<{width}} {size}" for name, size in rows)
        blocks = f"{self.pool_blocks:,} blocks of {self.block_tokens} tokens"
        return f"{text}\n  {blocks}: {self.pool_tokens:,} tokens of documents"
