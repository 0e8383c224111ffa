"""What a card's memory was really used for, phase by phase, beside what the ledger announced."""

import itertools
from dataclasses import dataclass, field

import torch

from service.engine.ledger import GIB, Ledger


@dataclass(frozen=True, slots=True)
class Mark:
    """State at the end of a phase, in bytes: tensors, what torch's allocator took for them, what the card lacks."""

    phase: str
    allocated: int
    reserved: int
    used: int


@dataclass(slots=True)
class Meter:
    """Call `mark(phase)` when a phase of the ledger (`load`, `tails`, `pool`) is over, `peak()` at the end."""

    device: torch.device
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.mark("before")

    def mark(self, phase: str) -> Mark:
        """Record the present state under the name of the phase that ends with it."""
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        self.marks.append(Mark(phase, allocated, reserved, total - free))
        return self.marks[-1]

    def peak(self) -> Mark:
        """The highest state since the meter was made. What CUDA took beside torch is never given back, so the
        present difference counts."""
        now = self.mark("work")
        reserved = torch.cuda.max_memory_reserved(self.device)
        outside = now.used - now.reserved
        return Mark("peak", torch.cuda.max_memory_allocated(self.device), reserved, outside + reserved)


def compare(ledger: Ledger, marks: list[Mark], peak: Mark) -> str:
    """Announced and measured per phase, and the relative error of the peak, as text (GiB)."""
    lines = [f"{'phase':<8} {'announced':>10} {'used':>10} {'reserved':>10} {'tensors':>10}"]
    for before, mark in itertools.pairwise(marks):
        took = (mark.used - before.used, mark.reserved - before.reserved, mark.allocated - before.allocated)
        lines.append(_row(mark.phase, ledger.nbytes(mark.phase), *took))
    start = marks[0]
    taken = (peak.used - start.used, peak.reserved - start.reserved, peak.allocated - start.allocated)
    lines.append(_row("peak", ledger.announced_nbytes, *taken))
    lines.append(f"error of the peak: {100 * error(ledger, marks[0], peak):+.2f} %")
    return "\n".join(lines)


def error(ledger: Ledger, start: Mark, peak: Mark) -> float:
    """(measured - announced) / announced of the peak."""
    return (peak.used - start.used) / ledger.announced_nbytes - 1


def _row(name: str, *nbytes: int) -> str:
    return f"{name:<8} " + " ".join(f"{n / GIB:10.3f}" for n in nbytes)
