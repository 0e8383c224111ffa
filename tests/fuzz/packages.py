"""Damage to what is packed in ZIP: to its list of parts, and to the parts while the list stays right."""

import io
import zipfile
from collections.abc import Callable, Sequence
from random import Random

from tests.fuzz.seeds import packed

Damage = Callable[[Random, bytes], bytes]
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_BOMB_NBYTES = 24 << 20
_NAMES = ("../../etc/x", "/etc/x", "C:\\x", "word/vbaProject.bin", "META-INF/encryption.xml", "a" * 4000, "\u202ex", "")


def parts_of(data: bytes) -> list[tuple[str, bytes]] | None:
    """None for what is no package any more."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(name, archive.read(name)) for name in archive.namelist()]
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError, RuntimeError, zipfile.zlib.error):
        return None


def inside(damages: Sequence[Damage]) -> Damage:
    """Damage to one part or two, in a package that is good."""

    def damage(random: Random, data: bytes) -> bytes:
        parts = parts_of(data)
        if not parts:
            return data
        texts = [n for n, (name, _) in enumerate(parts) if name.endswith((".xml", ".rels", ".xhtml", ".opf", ".ncx"))]
        for _ in range(random.choice((1, 1, 2)) if texts else 0):
            at = random.choice(texts)
            parts[at] = (parts[at][0], random.choice(damages)(random, parts[at][1]))
        return packed(parts)

    return damage


def parts_changed(random: Random, data: bytes) -> bytes:
    """A part left out, doubled, renamed, in another's place, or with another's contents."""
    parts = parts_of(data)
    if not parts:
        return data
    a, b = random.randrange(len(parts)), random.randrange(len(parts))
    match random.randrange(5):
        case 0:
            del parts[a]
        case 1:
            parts.insert(b, parts[a])
        case 2:
            parts[a] = (random.choice(_NAMES) or parts[b][0].upper(), parts[a][1])
        case 3:
            parts[a], parts[b] = parts[b], parts[a]
        case _:
            parts[a] = (parts[a][0], parts[b][1])
    return packed(parts) if parts else b"PK\x05\x06" + bytes(18)


def bomb(random: Random, data: bytes) -> bytes:
    """A part that unpacks to a thousand times its size: text, markup, or something beside."""
    parts = parts_of(data)
    if not parts:
        return data
    at = random.randrange(len(parts))
    filled = random.choice((b" ", b"\0", b"<w:p/>", b"<p>a</p>"))
    part = filled * (_BOMB_NBYTES // len(filled))
    if random.random() < 0.5:
        parts[at] = (parts[at][0], parts[at][1][:200] + part + parts[at][1][200:])
    else:
        parts.append(("word/media/a.png", part))
    return packed(parts)


def many_parts(random: Random, data: bytes) -> bytes:
    """Thousands of parts with nothing in them."""
    parts = parts_of(data)
    return packed([*parts, *((f"word/x{n}.xml", b"") for n in range(random.choice((300, 5_000))))]) if parts else data


def headers_changed(random: Random, data: bytes) -> bytes:
    """Sizes, times, flags, methods and checksums of the list that do not fit the parts."""
    changed = bytearray(data)
    mark = random.choice((_LOCAL, _CENTRAL, _CENTRAL, _END))
    places = [at for at in range(len(data)) if data.startswith(mark, at)]
    for at in random.sample(places, min(len(places), random.choice((1, 3, 100)))):
        offset = at + 4 + random.randrange(26)
        changed[offset : offset + 2] = random.choice((b"\0\0", b"\xff\xff", b"\x01\0", random.randbytes(2)))
    return bytes(changed)


def packed_in_another(random: Random, data: bytes) -> bytes:
    """A package in a package, or with something before or behind it."""
    match random.randrange(3):
        case 0:
            return packed([("word/document.xml", data)])
        case 1:
            return random.randbytes(random.choice((1, 2000))) + data
        case _:
            return data + random.choice((data, random.randbytes(70_000)))


DAMAGES: list[Damage] = [parts_changed, parts_changed, bomb, many_parts, headers_changed, packed_in_another]
