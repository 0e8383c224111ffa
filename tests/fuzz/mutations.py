"""Damage to bytes of any kind, and which damage is done to which format.

Everything follows from a seed and a number: `damaged("PDF", 1, 17)` is the same file in every run.
"""

import re
from collections.abc import Callable
from random import Random

from tests.fuzz import markup, packages, pdfs
from tests.fuzz.seeds import seeds

Damage = Callable[[Random, bytes], bytes]
_NUMBER = re.compile(rb"\d+")
_HUGE = (b"-1", b"0", b"65536", b"2147483647", b"4294967296", b"99999999999999999999", b"1e309", b"0.0000001")
_MOST_NBYTES = 1 << 20
"""Of a file that was made by doubling parts of it: what is only large is tested elsewhere."""


def damaged(format_name: str, seed: int, number: int) -> bytes:
    """File `number` of a format: a good one with one to three kinds of damage."""
    random = Random(f"{seed} {format_name} {number}")
    data = random.choice(seeds(format_name))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = random.choice(DAMAGES[format_name])(random, data)
    return data


def flipped_bits(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 4, 32)) if changed else 0):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def overwritten(random: Random, data: bytes) -> bytes:
    at, length = _place(random, data)
    with_what = random.choice((random.randbytes(length), b"\0" * length, b"\xff" * length))
    return data[:at] + with_what + data[at + length :]


def cut_short(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def without_a_chunk(random: Random, data: bytes) -> bytes:
    at, length = _place(random, data)
    return data[:at] + data[at + length :]


def chunk_doubled(random: Random, data: bytes) -> bytes:
    at, length = _place(random, data)
    times = min(random.choice((1, 2, 50)), max(1, _MOST_NBYTES // max(1, length)))
    return data[:at] + data[at : at + length] * times + data[at:]


def chunks_swapped(random: Random, data: bytes) -> bytes:
    first, length = _place(random, data)
    second, _ = _place(random, data)
    first, second = sorted((first, second))
    length = min(length, second - first)
    a, b = data[first : first + length], data[second : second + length]
    return data[:first] + b + data[first + length : second] + a + data[second + length :]


def inserted(random: Random, data: bytes) -> bytes:
    at, length = _place(random, data)
    return data[:at] + random.randbytes(min(length, 512)) + data[at:]


def other_numbers(random: Random, data: bytes) -> bytes:
    """Counts, lengths and references that are huge, negative or nothing."""
    share = random.choice((0.002, 0.02, 0.2))
    return _NUMBER.sub(lambda found: random.choice(_HUGE) if random.random() < share else found[0], data)


def _place(random: Random, data: bytes) -> tuple[int, int]:
    """Somewhere in the bytes, and a length that begins there."""
    at = random.randrange(len(data) + 1)
    return at, min(random.choice((1, 4, 64, 1024, len(data) // 3)), len(data) - at)


BYTES: list[Damage] = [
    flipped_bits, overwritten, cut_short, without_a_chunk, chunk_doubled, chunks_swapped, inserted, other_numbers,
]  # fmt: skip
DAMAGES: dict[str, list[Damage]] = {
    "PDF": [*BYTES, *pdfs.DAMAGES, *pdfs.DAMAGES],
    "DOCX": [*BYTES[:5], *packages.DAMAGES, *packages.DAMAGES, packages.inside(BYTES), packages.inside(markup.DAMAGES)],
    "EPUB": [*BYTES[:5], *packages.DAMAGES, *packages.DAMAGES, packages.inside(BYTES), packages.inside(markup.DAMAGES)],
    "HTML": [*BYTES, *markup.DAMAGES, *markup.DAMAGES],
    "Markdown": [*BYTES, *markup.PLAIN, *markup.PLAIN],
    "text": [*BYTES, *markup.PLAIN],
}
