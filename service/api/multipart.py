"""`multipart/form-data` taken in as it arrives: the file goes to its place, never to memory or `/tmp`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser
from multipart import parse_options_header as parse_options

from service.errors import Invalid, Malformed, Unsupported

MAX_FIELD_NBYTES = 16 * 1024
MAX_PARTS = 32
OVERHEAD_NBYTES = 1 << 20
"""Of a body above its file: boundaries, headers and text fields."""


@dataclass(slots=True)
class Form:
    """Text fields by name, and the name the client gave the file (None: there was no file)."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


def boundary_of(content_type: str) -> str:
    """Raises Unsupported for another content type, Malformed when it has no boundary."""
    kind, options = parse_options(content_type)
    if kind != "multipart/form-data":
        raise Unsupported("Send the document as multipart/form-data with a part named `file`.")
    if not options.get("boundary"):
        raise Malformed("The content type multipart/form-data has no boundary.")
    return options["boundary"]


async def read_form(
    body: AsyncIterator[bytes],
    boundary: str,
    *,
    names: frozenset[str],
    write: Callable[[bytes], Awaitable[None]],
    file: str = "file",
) -> Form:
    """Read a form whose only file part is named `file`, and whose bytes go to `write` as they come.

    Raises Malformed, or Invalid for a field that is not in `names`, comes twice or is too long.
    """
    reader = _FormReader(names, write, file)
    try:
        with PushMultipartParser(boundary, max_segment_count=MAX_PARTS, header_charset="latin1") as parser:
            async for chunk in body:
                for event in parser.parse(chunk) if chunk else ():
                    await reader.take(event)
    except ParserLimitReached as error:
        raise Malformed(f"The form has too many or too large parts: {error}.") from None
    except MultipartError as error:
        raise Malformed(f"The body is not a form: {error}.") from None
    return reader.form


class _FormReader:
    def __init__(self, names: frozenset[str], write: Callable[[bytes], Awaitable[None]], file: str) -> None:
        self.form = Form()
        self._file = file
        self._names = names
        self._write = write
        self._part: MultipartSegment | None = None
        self._text = bytearray()

    async def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        if isinstance(event, MultipartSegment):
            self._begin(event)
        elif event is None:
            self._end()
        elif self._name == self._file:
            await self._write(bytes(event))
        else:
            self._text += event
            if len(self._text) > MAX_FIELD_NBYTES:
                raise Invalid(f"The field is longer than {MAX_FIELD_NBYTES} bytes.", param=self._name)

    @property
    def _name(self) -> str:
        return _utf8((self._part.name or "") if self._part else "")

    def _begin(self, part: MultipartSegment) -> None:
        self._part, self._text = part, bytearray()
        name = self._name
        if name == self._file:
            if self.form.filename is not None:
                raise Invalid(f"Send one file; there is more than one part named `{name}`.", param=name)
            self.form.filename = _utf8(part.filename or "")
        elif name not in self._names:
            known = ", ".join(sorted(self._names | {self._file}))
            raise Invalid(f"There is no field {name[:40]!r}; the fields are {known}.", param=name[:40])
        elif name in self.form.fields:
            raise Invalid("The field comes twice.", param=name)

    def _end(self) -> None:
        if (name := self._name) == self._file:
            return
        try:
            self.form.fields[name] = self._text.decode()
        except UnicodeDecodeError:
            raise Invalid("The field is not UTF-8 text.", param=name) from None


def _utf8(text: str) -> str:
    """Headers arrive as bytes read one to one; nearly everyone writes UTF-8 in them."""
    return text.encode("latin1").decode(errors="replace")
