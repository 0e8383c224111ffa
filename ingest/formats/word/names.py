"""Names of WordprocessingML, and small questions to its elements."""

from collections.abc import Iterator
from typing import Any

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_OFF = {"0", "false", "off", "none"}


def value(element: Any, *path: str) -> str | None:
    """The attribute `val` at the end of a path of children, None where the path ends early."""
    for name in path:
        element = element.find(W + name) if element is not None else None
    return element.get(W + "val") if element is not None else None


def is_on(element: Any, name: str) -> bool:
    """A property such as ``<w:vanish/>``: on when it is there and does not say otherwise."""
    found = element.find(W + name) if element is not None else None
    return found is not None and (found.get(W + "val") or "1").lower() not in _OFF


def chosen(alternatives: Any) -> Iterator[Any]:
    """What is shown of an ``mc:AlternateContent``: its first choice, else its fallback, never both."""
    if (first := next(iter(alternatives), None)) is not None:
        yield from first
