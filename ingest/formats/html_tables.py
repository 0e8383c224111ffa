"""One table of an HTML page while it is read."""

from collections.abc import Mapping

from ingest.formats.tables import repeated, table_text, whole

_MOST_COLUMNS = 60
_MOST_ROWS = 1_000


class HtmlTable:
    """`cell`: what was said in the cell that is open, else None. `is_layout`: its cells are no table."""

    def __init__(self) -> None:
        self.cell: list[str] | None = None
        self.is_layout = False
        self._rows: list[list[str]] = []
        self._row: list[str] = []
        self._spans = (1, 1)
        self._above: dict[int, tuple[str, int]] = {}

    def enter(self, tag: str, attributes: Mapping[str, str | None]) -> None:
        """`tag` is ``tr``, ``td`` or ``th``."""
        if self.is_layout:
            return
        if tag == "tr":
            self._end_row()
            return
        self._fill()
        self.cell = []
        columns, rows = whole(attributes.get("colspan"), 1), whole(attributes.get("rowspan"), 1)
        self._spans = min(max(1, columns), _MOST_COLUMNS), min(max(1, rows), _MOST_ROWS)

    def leave(self, tag: str) -> None:
        if tag == "tr":
            self._end_row()
        elif self.cell is not None:
            self._end_cell(" ".join(self.cell))

    def become_layout(self) -> tuple[str, list[str]]:
        """Gives up being a table: what it had so far, and what the open cell had."""
        cell, self.cell = self.cell or [], None
        self.is_layout = True
        return self.text(), cell

    def text(self) -> str:
        self._end_row()
        rows, self._rows = self._rows, []
        return table_text(rows)

    def _end_cell(self, text: str) -> None:
        columns, rows = self._spans
        first = len(self._row)
        if rows > 1:
            self._above[first] = (repeated(text), rows - 1)
            self._above |= dict.fromkeys(range(first + 1, first + columns), ("", rows - 1))
        self._row += [text] + [""] * (columns - 1)
        self.cell = None

    def _fill(self) -> None:
        """Put in what reaches down from the rows above."""
        while (above := self._above.get(len(self._row))) is not None and len(self._row) < _MOST_COLUMNS:
            text, left = above
            self._above[len(self._row)] = (text, left - 1)
            if left == 1:
                del self._above[len(self._row)]
            self._row.append(text)

    def _end_row(self) -> None:
        if self._row:
            self._fill()
            self._rows.append(self._row)
        self._row = []
