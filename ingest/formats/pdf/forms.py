"""What people have filled in: fields of forms and text typed onto the page are no part of a page's contents."""

from collections.abc import Iterator

from pypdf import PageObject
from pypdf.generic import ArrayObject, DictionaryObject, PdfObject

_HIDDEN = 0b100010
"""Flags of an annotation: hidden, and not to be shown."""
_PUSH_BUTTON = 1 << 16
_RADIO = 1 << 15
_PASSWORD = 1 << 13
_MOST_PARENTS = 20


def filled_in(page: PageObject) -> str:
    """One line for each field with something in it, and for each check box."""
    annotations = _resolved(page.get("/Annots"))
    if not isinstance(annotations, ArrayObject):
        return ""
    found = (_resolved(annotation) for annotation in annotations)
    lines = [line for one in found if isinstance(one, DictionaryObject) for line in _lines(one)]
    return "\n".join(dict.fromkeys(lines))


def _lines(annotation: DictionaryObject) -> Iterator[str]:
    flags = _resolved(annotation.get("/F"))
    if isinstance(flags, int) and flags & _HIDDEN:
        return
    kind = annotation.get("/Subtype")
    if kind == "/FreeText":
        yield _words(annotation.get("/Contents"))
    elif kind == "/Widget" and (line := _field(annotation)):
        yield line


def _field(widget: DictionaryObject) -> str:
    chain = list(_chain(widget))
    flags = _inherited(chain, "/Ff")
    flags = flags if isinstance(flags, int) else 0
    match _inherited(chain, "/FT"):
        case "/Tx" if not flags & _PASSWORD:
            return _named(chain, _words(_inherited(chain, "/V")))
        case "/Ch":
            return _named(chain, _words(_inherited(chain, "/V")))
        case "/Btn" if not flags & _PUSH_BUTTON:
            return _button(chain, is_radio=bool(flags & _RADIO))
    return ""


def _button(chain: list[DictionaryObject], *, is_radio: bool) -> str:
    state = str(_resolved(chain[0].get("/AS")) or _inherited(chain, "/V") or "/Off").lstrip("/")
    if is_radio:
        return _named(chain, state) if state != "Off" else ""
    return f"{'☐' if state == 'Off' else '☒'} {_name(chain)}"


def _named(chain: list[DictionaryObject], value: str) -> str:
    name = _name(chain)
    return f"{name}: {value}" if name and value else value


def _name(chain: list[DictionaryObject]) -> str:
    """What the form calls the field for people, else its own name."""
    shown = next((_words(one.get("/TU")) for one in chain if "/TU" in one), "")
    return shown or ".".join(reversed([_words(one.get("/T")) for one in chain if "/T" in one]))


def _chain(widget: DictionaryObject) -> Iterator[DictionaryObject]:
    """The widget and the fields that it is part of."""
    current: PdfObject | None = widget
    for _ in range(_MOST_PARENTS):
        if not isinstance(current, DictionaryObject):
            return
        yield current
        current = _resolved(current.get("/Parent"))


def _inherited(chain: list[DictionaryObject], key: str) -> PdfObject | None:
    return next((_resolved(one.get(key)) for one in chain if key in one), None)


def _words(value: object) -> str:
    value = _resolved(value)
    if isinstance(value, ArrayObject):
        return ", ".join(filter(None, map(_words, value)))
    return " ".join(value.split()) if isinstance(value, str) and not value.startswith("/") else ""


def _resolved(value: object) -> PdfObject | None:
    return value.get_object() if isinstance(value, PdfObject) else None
