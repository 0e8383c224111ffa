"""Characters that Word writes by font and number: signs of formulas, boxes to tick, arrows."""

_LETTERS = "ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ", "αβχδεφγηιϕκλμνοπθρστυϖωξψζ"
_SIGNS = {
    0xA0: "€", 0xA2: "′", 0xA3: "≤", 0xA4: "⁄", 0xA5: "∞", 0xAB: "↔", 0xAC: "←", 0xAD: "↑", 0xAE: "→", 0xAF: "↓",
    0xB0: "°", 0xB1: "±", 0xB2: "″", 0xB3: "≥", 0xB4: "×", 0xB5: "∝", 0xB6: "∂", 0xB7: "•", 0xB8: "÷", 0xB9: "≠",
    0xBA: "≡", 0xBB: "≈", 0xBC: "…", 0xC6: "∅", 0xC7: "∩", 0xC8: "∪", 0xCE: "∈", 0xD2: "®", 0xD3: "©", 0xD4: "™",
    0xD5: "∏", 0xD6: "√", 0xD7: "⋅", 0xDB: "⇔", 0xDE: "⇒", 0xE5: "∑", 0xF2: "∫",
}  # fmt: skip
_SYMBOL = {
    **{place: chr(place) for place in range(0x20, 0x7F)},
    **dict(zip(range(0x41, 0x5B), _LETTERS[0], strict=True)),
    **dict(zip(range(0x61, 0x7B), _LETTERS[1], strict=True)),
    **_SIGNS,
}
_WINGDINGS = {
    0xB7: "•", 0xA7: "•", 0xFE: "☒", 0x78: "☒", 0xFD: "☒", 0xA8: "☐", 0x6F: "☐", 0x71: "☐", 0xFC: "✓", 0xE0: "→",
    0xDF: "←", 0xF0: "⇨",
}  # fmt: skip
_PRIVATE = range(0xF000, 0xF100)
_BEFORE_SURROGATES = range(0x20, 0xD800)


def symbol(font: str, char: str) -> str:
    """The character with the hexadecimal number `char`, "" for an ornament."""
    try:
        code = int(char, 16)
    except ValueError:
        return ""
    if font.lower() == "symbol":
        return _SYMBOL.get(code & 0xFF, "")
    if code in _PRIVATE:
        return _WINGDINGS.get(code & 0xFF, "")
    return chr(code) if code in _BEFORE_SURROGATES else ""
