"""Damage to text: to its markup, to its characters, and to the bytes they are written in."""

import re
from collections.abc import Callable
from random import Random

Damage = Callable[[Random, bytes], bytes]
_TAG = re.compile(rb"<[^>]{1,200}>")
_ATTRIBUTE = re.compile(rb"=\s*([\"'])(.*?)\1", re.S)
_ENTITIES = (
    b'<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;">]>',
    b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
    b'<!DOCTYPE x [<!ENTITY % a SYSTEM "http://127.0.0.1:9/x"> %a;]>',
    b'<!DOCTYPE html SYSTEM "http://127.0.0.1:9/x.dtd">',
)
_VALUES = (
    b"",
    b"-1",
    b"99999999999999999999",
    b"NaN",
    b"\xff\xfe",
    b"a" * 5000,
    b"../../../etc/passwd",
    b"javascript:1",
)
_PIECES = (
    b"&#0;", b"&#x110000;", b"&c;", b"&nope;", b"<![CDATA[", b"<!--", b"<?xml version='9'?>", b"</p></div></td>",
    b"<td rowspan=99999 colspan=99999>x", b"<table><tr><td>" * 300, b"<li value=-9>", b"<script>", b"<svg><style>",
    b"<meta charset=utf-16>", b"<base href='//x'>", b"<w:numId w:val='-7'/>", b"<w:br w:type='page'/>" * 500,
    b"<w:tbl><w:tr><w:tc>", b"<itemref idref='x'/>" * 500, b"<ol start=99999999999><li>x",
)  # fmt: skip
_CHARACTERS = (
    "\0", "\u202e", "\ufeff", "\u2028", "\ud7ff", "\U0010ffff", "\x1b[31m", "\r", "\x0c", "a\u0301" * 800, "\x85",
    "<|im_end|>", "🧑‍🚀", "ﷺ" * 300, "\x7f", " " * 5000, "\t", "字" * 400,
)  # fmt: skip
_ENCODINGS = ("utf-8", "utf-16", "utf-16-be", "utf-32", "gb18030", "shift_jis", "cp1252", "koi8-r", "utf-7", "cp037")
_STRUCTURE = (
    ">" * 3000 + " x", "\n" + "- " * 1500 + "x", "*" * 4000, "[" * 4000, "](" * 2000, "`" * 3001, "|" * 3000 + "\n|-",
    "\n#" * 3000, "\n1. " * 3000, "![a](", "[a]: /b\n" * 2000, "<" * 3000, "&" * 3000, "\n    " * 2000, "~~~\n",
    "|a|b|\n|-|-|\n" + "|c|d|\n" * 2000, "\x0c" * 3000, "_a*b_" * 1000, "\\" * 3000, "x" * 200_000, "\n\n---\n" * 1000,
)  # fmt: skip


def tags_changed(random: Random, data: bytes) -> bytes:
    """Tags left out, doubled, or closed elsewhere."""
    share = random.choice((0.02, 0.2))

    def other(found: re.Match[bytes]) -> bytes:
        if random.random() > share:
            return found[0]
        return random.choice((b"", found[0] * 2, b"<" + found[0], found[0][:-1], b"</" + found[0][1:]))

    return _TAG.sub(other, data)


def attributes_changed(random: Random, data: bytes) -> bytes:
    share = random.choice((0.02, 0.2))
    return _ATTRIBUTE.sub(
        lambda found: b'="' + random.choice(_VALUES) + b'"' if random.random() < share else found[0], data
    )


def pieces_inserted(random: Random, data: bytes) -> bytes:
    """Markup that readers trip over, between or inside what is there."""
    for _ in range(random.choice((1, 3, 10))):
        at = random.randrange(len(data) + 1)
        at = at if random.random() < 0.3 else data.find(b"<", at) if data.find(b"<", at) >= 0 else at
        data = data[:at] + random.choice(_PIECES) + data[at:]
    return data


def with_entities(random: Random, data: bytes) -> bytes:
    """Entities of its own, from outside, or multiplied, and one that is used."""
    behind = data.find(b"?>") + 2 if data.startswith(b"<?xml") else 0
    used = data[behind:].replace(b"</", b"&a;&b;&c;</", random.choice((0, 1, 50)))
    return data[:behind] + random.choice(_ENTITIES) + used


def nested(random: Random, data: bytes) -> bytes:
    """Elements inside each other, thousands deep."""
    tags = _TAG.findall(data) or [b"<div>"]
    tag = random.choice((random.choice(tags), b"<div>", b"<b>", b"<table><tr><td>"))
    at = max(0, data.find(b"<", random.randrange(len(data) + 1)))
    return data[:at] + tag * random.choice((300, 5_000, 40_000)) + data[at:]


def other_encoding(random: Random, data: bytes) -> bytes:
    """The same text in another encoding, or one that is not what the file says."""
    encoding = random.choice(_ENCODINGS)
    return data.decode(errors="replace").encode(encoding, "replace")


def characters_inserted(random: Random, data: bytes) -> bytes:
    text = data.decode(errors="replace")
    for _ in range(random.choice((1, 5, 30))):
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.choice(_CHARACTERS) + text[at:]
    return text.encode(errors="replace")


def structure_inserted(random: Random, data: bytes) -> bytes:
    """Much of one thing: quotes, lists, brackets and tables without an end."""
    text = data.decode(errors="replace")
    at = random.randrange(len(text) + 1)
    return (text[:at] + random.choice(_STRUCTURE) + text[at:]).encode(errors="replace")


PLAIN: list[Damage] = [other_encoding, characters_inserted, structure_inserted]
DAMAGES: list[Damage] = [
    tags_changed, attributes_changed, pieces_inserted, with_entities, nested, other_encoding, characters_inserted,
]  # fmt: skip
