"""The form of a memory plan, the same for every engine: named lines in bytes, and what is left for documents.

Nothing here imports torch, so that a plan can be made where no model is loaded.
"""

from dataclasses import dataclass

from service.engine.models.errors import ModelError

GIB = 1 << 30


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

    def table(self) -> str:
        """The lines as text, in GiB."""
        rows = [(line.name, f"{line.nbytes / GIB:9.3f} GiB") for line in self.lines]
        rows.append((self.place, f"{self.memory.total / GIB:9.3f} GiB"))
        width = max(len(name) for name, _ in rows)
        text = "\n".join(f"  {name:<{width}} {size}" for name, size in rows)
        blocks = f"{self.pool_blocks:,} blocks of {self.block_tokens} tokens"
        return f"{text}\n  {blocks}: {self.pool_tokens:,} tokens of documents"
