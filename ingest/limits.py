"""What reading one document may cost."""

from dataclasses import dataclass

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """Bounds of one parser process; whichever is reached first ends it, and the error names it.

    `wall_s` is the whole document's time, `page_wall_s` the longest pause between two pages (or before the
    first one), `cpu_s` the processor time the kernel grants. `memory_nbytes` bounds the address space, so it
    has to leave room for the interpreter (about 150 MiB). `text_nbytes` is the document's text as UTF-8.
    """

    max_pages: int = 5_000
    wall_s: float = 900.0
    page_wall_s: float = 60.0
    cpu_s: int = 600
    memory_nbytes: int = 2048 * _MIB
    text_nbytes: int = 64 * _MIB

    def __post_init__(self) -> None:
        if min(self.max_pages, self.wall_s, self.page_wall_s, self.cpu_s, self.text_nbytes) <= 0:
            raise ValueError("every limit must be above zero")
        if self.memory_nbytes < 128 * _MIB:
            raise ValueError("memory_nbytes must be at least 128 MiB: the parser process itself needs that")
