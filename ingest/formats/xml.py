"""Small XML files inside packed documents."""

import re
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from ingest.errors import DamagedFile, UnsafeFile

_ENTITIES = "its XML defines entities, by which a few bytes can be blown up to gigabytes or other files be read"
_DECLARES = re.compile(rb"<!(?:DOCTYPE|ENTITY)", re.IGNORECASE)


def parse_small(data: bytes, what: str) -> Element:
    """The root of a description such as a list of parts; `what` names it for DamagedFile. Raises UnsafeFile for
    entities; a document type that defines none is let pass and not fetched."""
    try:
        return fromstring(data, forbid_dtd=False, forbid_entities=True, forbid_external=True)
    except DefusedXmlException:
        raise UnsafeFile(_ENTITIES) from None
    except (ParseError, ValueError, LookupError):
        raise DamagedFile(f"{what} cannot be read") from None


def refuse_declarations(data: bytes) -> None:
    """Raises UnsafeFile for XML with a document type of its own: Office documents never have one."""
    # UTF-16 is read as its letters: it has a zero beside each.
    if _DECLARES.search(data.replace(b"\0", b"") if b"\0" in data[:64] else data):
        raise UnsafeFile(_ENTITIES)


def local_name(tag: object) -> str:
    """The name of an element without its namespace; "" for comments and the like."""
    return tag.rpartition("}")[2] if isinstance(tag, str) else ""
