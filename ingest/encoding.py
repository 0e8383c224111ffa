"""Which encoding a text file is in, decided from its bytes alone.

Byte order marks, then UTF-16 by its zero bytes, then UTF-8, then what the remaining bytes look like: GB18030
and Western Latin by checks of our own (which hold for a handful of bytes), anything else by
charset-normalizer.
"""

import re
from dataclasses import dataclass

import charset_normalizer

_BOMS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_SAMPLE_NBYTES = 256 * 1024
_SHORT_NBYTES = 24
"""Below this many bytes only the checks of our own say anything."""
_LATINS = ["cp1250", "iso8859_2", "cp1257", "cp1254", "cp1252"]
_OTHERS = [
    *("cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp874"),
    *("cp932", "euc_jp", "cp949", "big5", "gb18030", *_LATINS),
]
_HIGH_RUN = re.compile(rb"[\x80-\xff]+")
# Bytes windows-1252 leaves undefined: text with them is Latin-1 at best.
_UNDEFINED_1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
_WIDE_MARKS = re.compile("[\u3001\u3002\uff0c\uff1a\uff1b\u3042-\u3093]")
_COMMON = re.compile(
    "[\t\n\r -~\u00a0-\u017f\u0370-\u04ff\u2010-\u2026\u3000-\u30ff\u4e00-\u9fff\uac00-\ud7a3\uff00-\uff65]"
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """`text` as the file has it, `encoding` a Python codec name; `warning` tells what was guessed or lost."""

    text: str
    encoding: str
    warning: str | None = None


def decode(data: bytes) -> Decoded | None:
    """The text in `data`, or None when it reads as no text at all."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return decoded_as(data[len(mark) :], encoding)
    if b"\0" in data and (wide := _utf16_by_zeros(data)):
        return decoded_as(data, wide)
    if (decoded := _utf8(data)) is not None:
        return decoded
    return _legacy(data)


def looks_binary(text: str) -> bool:
    """Whether decoded text is too full of control characters to be anyone's writing."""
    sample = text[:65536]
    n_controls = sum((char < " " and char not in "\t\n\r\f\0\x1b\x1a") or "\x7f" <= char < "\xa0" for char in sample)
    n_zeros = sample.count("\0")
    return n_controls > 0.02 * len(sample) + 1 or n_zeros > 0.2 * len(sample) + 1


def decoded_as(data: bytes, encoding: str) -> Decoded:
    """The text in `data` by an encoding that is known; a warning tells what is no character in it."""
    text = data.decode(encoding, "replace")
    lost = text.count("\ufffd")
    return Decoded(text, encoding, _lost_warning(lost, encoding) if lost else None)


def _lost_warning(n_lost: int, encoding: str) -> str:
    return f"{n_lost:,} characters are not valid {encoding.upper()} and were replaced by U+FFFD."


def _utf16_by_zeros(data: bytes) -> str | None:
    """UTF-16 without a mark: in any script, spaces and line ends have their zero byte on one side only."""
    sample = data[: _SAMPLE_NBYTES & ~1]
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    encoding = "utf-16-le" if odd > even else "utf-16-be"
    more, fewer = max(even, odd), min(even, odd)
    if more < 0.02 * len(sample) / 2 or fewer > 0.2 * more:
        return None
    return encoding if _common_share(sample.decode(encoding, "replace")) > 0.9 else None


def _common_share(text: str) -> float:
    return len(_COMMON.findall(text)) / max(1, len(text))


def _utf8(data: bytes) -> Decoded | None:
    """UTF-8, also with a few broken bytes in a text that is otherwise clearly UTF-8."""
    text = data.decode("utf-8", "replace")
    n_lost = text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
    if not n_lost:
        return Decoded(text, "utf-8")
    n_wide = sum(char > "\x7f" for char in text) - n_lost
    return Decoded(text, "utf-8", _lost_warning(n_lost, "utf-8")) if n_wide >= 10 * n_lost else None


def _legacy(data: bytes) -> Decoded | None:
    if _is_gb18030(data):
        return Decoded(data.decode("gb18030", "replace"), "gb18030")
    if wide := _utf16_by_script(data):
        return decoded_as(data, wide)
    sample = data[:_SAMPLE_NBYTES]
    western = _western(data)
    if looks_binary(western.text):
        return _asked(sample, data, _OTHERS)
    if len(data) < _SHORT_NBYTES or _accents_stand_alone(sample):
        return (_asked(sample, data, _LATINS) if _reads_central_european(western.text) else None) or western
    return _asked(sample, data, _OTHERS) or western


def _accents_stand_alone(sample: bytes) -> bool:
    """Few accented letters between plain ones, as in every Latin script."""
    runs = _HIGH_RUN.findall(sample)
    n_high = sum(map(len, runs))
    return n_high < 0.4 * len(sample) and sum(len(run) for run in runs if len(run) <= 3) >= 0.8 * n_high


def _asked(sample: bytes, data: bytes, candidates: list[str]) -> Decoded | None:
    best = charset_normalizer.from_bytes(sample, cp_isolation=candidates).best()
    return None if best is None or looks_binary(str(best)) else _guessed(data, best.encoding)


def _guessed(data: bytes, encoding: str) -> Decoded:
    text = data.decode(encoding, "replace")
    return Decoded(text, encoding, f"The file does not say its encoding; it was read as {encoding}.")


def _western(data: bytes) -> Decoded:
    encoding = "latin-1" if _UNDEFINED_1252.search(data) else "cp1252"
    return Decoded(data.decode(encoding), encoding)


_WESTERN_LETTERS = re.compile("[À-ÖØ-öø-ÿŠšŽžŒœŸ]")
# In windows-1250 and its kin these are letters; in Western text they hardly stand inside a word.
_MARKS_INSIDE_WORDS = re.compile("(?<=[a-z])[£¥¢¹³¼¾¿±ªº](?=[a-z])")


def _reads_central_european(western: str) -> bool:
    n_inside = len(_MARKS_INSIDE_WORDS.findall(western))
    return n_inside > 0.1 * len(_WESTERN_LETTERS.findall(western)) and n_inside >= 2


def _is_gb18030(data: bytes) -> bool:
    """Mostly first-level hanzi (ordered by pinyin, lead bytes B0-D7) and GB 2312 punctuation.

    Korean shares the lead bytes B0-C8 only, Japanese has kana in nearly every phrase, Cyrillic lies above D7.
    """
    sample = data[:_SAMPLE_NBYTES]
    try:
        text = sample.decode("gb18030") if sample == data else sample.decode("gb18030", "ignore")
    except UnicodeDecodeError:
        return False
    codes = [char.encode("gb18030", "ignore") for char in text if char > "\x7f"]
    hanzi = [code for code in codes if len(code) == 2 and 0xB0 <= code[0] <= 0xD7 and code[1] >= 0xA1]
    marks = [code for code in codes if len(code) == 2 and code[0] in (0xA1, 0xA3) and code[1] >= 0xA1]
    n_rare = sum(len(code) == 4 for code in codes)
    if not hanzi or len(hanzi) + len(marks) < 0.8 * (len(codes) - n_rare):
        return False
    return len(hanzi) < 8 or sum(code[0] > 0xC8 for code in hanzi) >= 0.1 * len(hanzi)


def _utf16_by_script(data: bytes) -> str | None:
    """UTF-16 of a script without spaces: one byte order gives common characters, the other rare ones."""
    sample = data[: _SAMPLE_NBYTES & ~1]
    if len(data) % 2 or len(sample) < 8:
        return None
    shares = {name: _common_share(sample.decode(name, "replace")) for name in ("utf-16-le", "utf-16-be")}
    best = max(shares, key=lambda name: shares[name])
    n_marks = len(_WIDE_MARKS.findall(sample.decode(best, "replace")))
    return best if shares[best] > 0.97 and n_marks > 0.01 * len(sample) / 2 else None
