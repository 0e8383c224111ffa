"""Tables as lines of text, for formats that have them as such, and the numbers that their markup has."""

from collections.abc import Sequence

_REPEATED_CHARS = 40


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """One line a row, ``| a | b |``, with a rule below the first; plain lines where there is only one column. Rows
    without text are left out, cells are one line each, and short rows are filled up."""
    kept = [[" ".join(cell.split()) for cell in row] for row in rows]
    kept = [row for row in kept if any(row)]
    width = max(map(len, kept), default=0)
    if width <= 1:
        return "\n".join(row[0] for row in kept)
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in kept]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])


def repeated(cell: str) -> str:
    """What a cell that spans several rows says in the later ones: its text, so that each row can be read by itself; a
    long one is said once."""
    return cell if len(cell) <= _REPEATED_CHARS else ""


def whole(text: str | None, default: int) -> int:
    """An attribute as a whole number; `default` for none, and for anything that is not one."""
    try:
        return int(text) if text is not None else default
    except ValueError:
        return default
