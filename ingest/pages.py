"""What every page goes through on its way out of the parser process."""

from ingest.errors import TextTooLong
from ingest.limits import ParseLimits
from ingest.normalise import tidy

MAX_TITLE_CHARS = 200
_MAX_LABEL_CHARS = 80


class Budget:
    """Counts the document's text against its limit."""

    def __init__(self, limits: ParseLimits) -> None:
        self._limit = self._left = limits.text_nbytes

    def spend(self, text: str) -> None:
        """Raises TextTooLong."""
        self._left -= len(text.encode())
        if self._left < 0:
            raise TextTooLong(self._limit)


def short_title(title: str | None) -> str | None:
    """A title on one line, None for none."""
    return (" ".join(tidy(title).split())[:MAX_TITLE_CHARS] or None) if title else None


def short_label(label: str | None, number: int) -> str | None:
    """A page's own name on one line, None where that is its number."""
    short = " ".join(tidy(label).split())[:_MAX_LABEL_CHARS] if label else ""
    return short if short and short != str(number) else None
