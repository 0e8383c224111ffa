"""Damage that knows how a PDF is made: objects, references, the cross-reference table, packed streams."""

import re
import zlib
from collections.abc import Callable
from random import Random

_OBJECT = re.compile(rb"\d+ 0 obj.*?endobj", re.S)
_REFERENCE = re.compile(rb"(\d+) 0 R")
_START = re.compile(rb"startxref\s+\d+")
_STREAM = re.compile(rb"stream\r?\n(.*?)\r?\nendstream", re.S)
_COUNT = re.compile(rb"/(Count|Length|N|First|W|Size|Rotate|Kids)\b\s*(-?\d+|\[[^\]]*\])?")
_WORDS = (b"obj", b"endobj", b"stream", b"endstream", b"xref", b"trailer", b"<<", b">>", b"[", b"]", b"R", b"%%EOF")
_OPERATORS = (
    b"q " * 3000, b"BT " * 500, b"/X0 Do ", b"ET Q ", b"1 0 0 1 1e38 1e38 cm ", b"(\\377\\000) Tj ",
    b"[(a)-9e9(b)] TJ ", b"/F1 1e30 Tf ", b"/F99 0 Tf ", b"99999999999 Tc ", b"<< " * 2000, b"[ " * 2000, b"(" * 2000,
    b"BI /W 99999 ID ",
)  # fmt: skip


def references_changed(random: Random, data: bytes) -> bytes:
    """References to another object, to none, or back to where they are."""
    numbers = [int(found[1]) for found in _REFERENCE.finditer(data)] or [1]
    share = random.choice((0.05, 0.3, 1.0))

    def other(found: re.Match[bytes]) -> bytes:
        number = random.choice((random.choice(numbers), 0, 999_999))
        return b"%d 0 R" % number if random.random() < share else found[0]

    return _REFERENCE.sub(other, data)


def xref_broken(random: Random, data: bytes) -> bytes:
    """The table is said to be elsewhere, or is not there."""
    if random.random() < 0.3:
        at = data.rfind(b"xref\n")
        return data[:at] if at > 0 else data
    offset = random.choice((0, 1, len(data) // 2, len(data) * 2, 2**31, 2**63))
    return _START.sub(b"startxref\n%d" % offset, data)


def xref_of_itself(random: Random, data: bytes) -> bytes:
    """A table before this one, which is this one."""
    started = _START.search(data)
    here = started[0].split()[-1] if started else b"9"
    return data.replace(b"trailer\n<<", b"trailer\n<< /Prev " + here, 1).replace(b"/Root", b"/Prev 9 /Root", 1)


def objects_shuffled(random: Random, data: bytes) -> bytes:
    """Objects left out, doubled, or with another's contents."""
    objects = _OBJECT.findall(data)
    if not objects:
        return data
    at, other = random.choice(objects), random.choice(objects)
    head, body = at.partition(b"obj")[0], other.partition(b"obj")[2]
    return data.replace(at, random.choice((b"", at + b"\n" + at, other, head + b"obj" + body)), 1)


def counts_changed(random: Random, data: bytes) -> bytes:
    """Counts, lengths, sizes, turns and lists of pages that cannot be."""
    values = (b"-1", b"2147483648", b"99999999999999", b"[]", b"[1 0 R 1 0 R 1 0 R]", b"null", b"(x)", b"89.5", b"<<>>")
    share = random.choice((0.2, 1.0))
    return _COUNT.sub(
        lambda found: b"/" + found[1] + b" " + random.choice(values) if random.random() < share else found[0], data
    )


def nested(random: Random, data: bytes) -> bytes:
    """Lists and dictionaries inside each other, thousands deep."""
    deep = random.choice((500, 5_000, 50_000))
    opening, closing = random.choice(((b"[", b"]"), (b"<</A", b">>"), (b"<</Kids[", b"]>>"), (b"(", b")")))
    inside = b"/Deep " + opening * deep + closing * random.choice((0, deep))
    return data.replace(b"/Type", inside + b" /Type", random.choice((1, 3)))


def words_changed(random: Random, data: bytes) -> bytes:
    """Words of the syntax left out, or others in their place."""
    word = random.choice(_WORDS)
    return data.replace(word, random.choice((b"", *_WORDS)), random.choice((1, 2, -1)))


def streams_changed(random: Random, data: bytes) -> bytes:
    """What a page draws is other than it was: unpacked, damaged and packed again."""

    def other(found: re.Match[bytes]) -> bytes:
        try:
            unpacked = zlib.decompress(found[1])
        except zlib.error:
            return found[0]
        at = random.randrange(len(unpacked) + 1)
        what = random.choice(_OPERATORS)
        changed = unpacked[:at] + what * random.choice((1, 1, 20)) + unpacked[at + random.choice((0, 5)) :]
        return b"stream\n" + zlib.compress(changed) + b"\nendstream"

    return _STREAM.sub(other, data)


def stream_bomb(random: Random, data: bytes) -> bytes:
    """A page's drawing that unpacks to a thousand times its size."""
    what = random.choice((b"\0", b"q ", b"(a) Tj ", b"["))
    bomb = b"stream\n" + zlib.compress(what * (random.choice((4, 32)) * 2**20 // len(what))) + b"\nendstream"
    return _STREAM.sub(lambda _: bomb, data, count=1)


def many_pages(random: Random, data: bytes) -> bytes:
    """The same pages thousands of times in the list."""
    times = random.choice((100, 7_000))
    return re.sub(rb"/Kids\s*\[([^\]]*)\]", lambda found: b"/Kids [" + found[1] * times + b"]", data, count=1)


DAMAGES: list[Callable[[Random, bytes], bytes]] = [
    references_changed, xref_broken, xref_of_itself, objects_shuffled, counts_changed, nested, words_changed,
    streams_changed, stream_bomb, many_pages,
]  # fmt: skip
