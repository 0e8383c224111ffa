"""The header of a GGUF file, walked once within the bytes that are there. Needs no torch.

gguf's reader and transformers believe every count they find: a few bytes keep them busy for days, or take all memory.
So this walk comes before they see a file that somebody brought.
"""

import mmap
import struct
from collections.abc import Iterable, Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFReader, GGUFValueType

from service.engine.models.errors import SourceRefused

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_FIELDS = _MOST_TENSORS = 1 << 16
_MOST_ELEMENTS = 1 << 22
"""Of all arrays together: gguf's reader makes an object of each. A vocabulary with merges has 500,000."""
_MOST_TEXT_NBYTES = 1 << 24
_MOST_DIMENSIONS = 4
_MOST_WEIGHTS = 1 << 48
_LENGTH, _TYPE = struct.Struct("<Q"), struct.Struct("<I")
_PREAMBLE = struct.Struct("<4sIQQ")
_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.BOOL: "?", GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip


class Texts(NamedTuple):
    """In the place of an array of texts: how many there are."""

    n: int


class Tensor(NamedTuple):
    """`shape` has the slowest dimension first, as torch has it. `first`: where in the file it begins."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    first: int
    nbytes: int

    @property
    def n_elements(self) -> int:
        return prod(self.shape)


class Header(NamedTuple):
    """`fields`: numbers, truths, texts, lists of numbers, and `Texts`, by key."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def n_parameters(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors.values())

    def number(self, key: str, default: int | None = None, *, least: int = 0, most: int = 2**31 - 1) -> int:
        """A whole number. Raises SourceRefused for anything else, and where it is missing without a default."""
        if default is not None and key not in self.fields:
            return default
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refused(key, f"a whole number of {least:,} to {most:,}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises SourceRefused."""
        value = self._value(key) if default is None else self.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value > 0):
            raise self.refused(key, "a positive number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Raises SourceRefused."""
        value = self._value(key) if default is None else self.fields.get(key, default)
        if not isinstance(value, str):
            raise self.refused(key, "a text")
        return value

    def refused(self, key: str, wanted: str) -> SourceRefused:
        found = self.fields[key]
        shown = f"{found.n:,} texts" if isinstance(found, Texts) else repr(found)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        return SourceRefused(f"{self.path} is damaged: its {key} is {shown}, and has to be {wanted}")

    def _value(self, key: str) -> Any:
        if key not in self.fields:
            raise SourceRefused(f"{self.path} does not say its {key}, as every GGUF of a language model does")
        return self.fields[key]


def open_gguf(path: Path) -> GGUFReader:
    """gguf's reader, for a file whose header was walked. Raises SourceRefused."""
    read_header(path)
    return GGUFReader(path)


def read_header(path: Path) -> Header:
    """Raises SourceRefused for a file that is none, or says what cannot be, or ends before its last tensor."""
    try:
        with path.open("rb") as file:
            if not (nbytes := file.seek(0, 2)):
                raise SourceRefused(f"{path} cannot be read as a GGUF: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walk(path, data, nbytes).header()
    except OSError as error:
        raise SourceRefused(f"{path} cannot be read as a GGUF: {error.strerror or error}") from None


class _Walk:
    """A place in a file, which goes forward."""

    def __init__(self, path: Path, data: mmap.mmap, nbytes: int) -> None:
        self.path, self.data, self.nbytes = path, data, nbytes
        self.at = self.n_elements = 0

    def header(self) -> Header:
        n_tensors, n_fields = self._counts()
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self._text("a key")
            if key in fields:
                raise self._wrong(f"it has {key!r} twice")
            fields[key] = self._value(key, self._kind(key))
        tensors = self._laid_out([self._tensor() for _ in range(n_tensors)], self._alignment(fields))
        return Header(self.path, fields, tensors)

    def _counts(self) -> tuple[int, int]:
        if self.data[: len(MAGIC)] != MAGIC[: self.nbytes]:
            raise self._wrong("it does not begin as one")
        _, version, n_tensors, n_fields = self._take(_PREAMBLE, "its header")
        if version not in _VERSIONS:
            turned = " of the other byte order" if version and not version & 0xFFFF else ""
            raise self._wrong(f"it is of version {version}{turned}, and only versions 2 and 3 are read")
        if n_fields > _MOST_FIELDS or n_tensors > _MOST_TENSORS:
            raise self._wrong(f"it says that it has {n_fields:,} keys and {n_tensors:,} tensors, which no model has")
        return n_tensors, n_fields

    def _alignment(self, fields: Mapping[str, Any]) -> int:
        found = fields.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1 or found & (found - 1):
            raise self._wrong(f"its general.alignment is {found!r}, and has to be a power of two")
        return found

    def _value(self, key: str, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._text(key)
        if kind == GGUFValueType.ARRAY:
            return self._array(key)
        return self._take(struct.Struct(f"<{_SCALARS[kind]}"), key)[0]

    def _array(self, key: str) -> Any:
        kind, (count,) = self._kind(key), self._take(_LENGTH, key)
        if kind == GGUFValueType.ARRAY:
            raise self._wrong(f"its {key} is a list of lists, which no reader understands")
        if count * (8 if kind == GGUFValueType.STRING else 1) > self.nbytes - self.at:
            raise self._wrong(f"its {key} says that it has {count:,} elements, more than the file has room for")
        self.n_elements += count
        if self.n_elements > _MOST_ELEMENTS:
            raise self._wrong(f"its lists have more than {_MOST_ELEMENTS:,} elements, which no model has ({key})")
        if kind == GGUFValueType.STRING:
            return self._texts(key, count)
        return list(self._take(struct.Struct(f"<{count}{_SCALARS[kind]}"), key))

    def _texts(self, key: str, count: int) -> Texts:
        """Passes over them; every one is looked at, for transformers reads them all."""
        unpack, data, at, last = _LENGTH.unpack_from, self.data, self.at, self.nbytes - _LENGTH.size
        try:
            for _ in range(count):
                if at > last:
                    raise self._cut(key)
                first, at = at + 8, at + 8 + unpack(data, at)[0]
                str(data[first:at], "utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"its {key} has a text that is not UTF-8") from None
        if at > self.nbytes:
            raise self._cut(key)
        self.at = at
        return Texts(count)

    def _tensor(self) -> Tensor:
        """`first` counts from where tensors begin."""
        name = self._text("a tensor's name")
        (n_dimensions,) = self._take(_TYPE, name)
        if not 1 <= n_dimensions <= _MOST_DIMENSIONS:
            raise self._wrong(f"its tensor {name} has {n_dimensions:,} dimensions")
        shape = self._take(struct.Struct(f"<{n_dimensions}Q"), name)[::-1]
        (number,), (first,) = self._take(_TYPE, name), self._take(_LENGTH, name)
        if not 1 <= prod(shape) <= _MOST_WEIGHTS:
            raise self._wrong(f"its tensor {name} is of shape {shape}, which no tensor has")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._wrong(f"its tensor {name} is of a type that is not known ({number})") from None
        block, block_nbytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._wrong(f"its tensor {name} has rows of {shape[-1]:,}, and {kind.name} stores {block} at a time")
        return Tensor(name, kind, shape, first, prod(shape) // block * block_nbytes)

    def _laid_out(self, found: Iterable[Tensor], alignment: int) -> dict[str, Tensor]:
        """One behind the other, as llama.cpp wants them."""
        start = end = _padded(self.at, alignment)
        tensors: dict[str, Tensor] = {}
        for tensor in found:
            first = _padded(end, alignment)
            if tensor.name in tensors:
                raise self._wrong(f"it has the tensor {tensor.name} twice")
            if start + tensor.first != first:
                raise self._wrong(f"its tensor {tensor.name} does not begin where the one before it ends")
            tensors[tensor.name] = tensor._replace(first=first)
            end = first + tensor.nbytes
        if end > self.nbytes and tensors:
            raise self._wrong(f"it is cut off: {end - self.nbytes:,} bytes of its tensors are missing; get it again")
        return tensors

    def _take(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        first, self.at = self.at, self.at + form.size
        if self.at > self.nbytes:
            raise self._cut(what)
        return form.unpack_from(self.data, first)

    def _kind(self, key: str) -> GGUFValueType:
        (number,) = self._take(_TYPE, key)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._wrong(f"its {key} is of a type that is not known ({number})") from None

    def _text(self, what: str) -> str:
        (length,) = self._take(_LENGTH, what)
        if length > _MOST_TEXT_NBYTES or length > self.nbytes - self.at:
            raise self._wrong(f"{what} says that it is {length:,} bytes long, more than there can be")
        first, self.at = self.at, self.at + length
        try:
            return str(self.data[first : self.at], "utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"{what} is not UTF-8") from None

    def _cut(self, what: str) -> SourceRefused:
        return self._wrong(f"it is cut off: its {self.nbytes:,} bytes end within {what}; get it again")

    def _wrong(self, why: str) -> SourceRefused:
        return SourceRefused(f"{self.path} cannot be read as a GGUF: {why}")


def _padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
