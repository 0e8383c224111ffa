"""How much of a document its owner wants to stay in memory: a preset's name, numbers, or nothing."""

from typing import Annotated, Any

import msgspec

from service.errors import Invalid

AUTOMATIC = "automatic"
FULL = "full"
CUSTOM = "custom"

_FORM = (
    'retention is `full`, `balanced`, `small`, or JSON with three whole numbers, such as {"sink_tokens": 16, '
    '"summary_tokens": 1024, "window_tokens": 512}: at least 4, 0 and 1. Leave it out to have it chosen'
)


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stays resident of a windowed document, in tokens: its beginning, chosen ones, its end."""

    sink_tokens: Annotated[int, msgspec.Meta(ge=4)]
    summary_tokens: Annotated[int, msgspec.Meta(ge=0)]
    window_tokens: Annotated[int, msgspec.Meta(ge=1)]

    @property
    def n_tokens(self) -> int:
        """All of them."""
        return self.sink_tokens + self.summary_tokens + self.window_tokens


PRESETS = {"balanced": Kept(16, 1024, 512), "small": Kept(16, 0, 256)}
_NAMES = frozenset({AUTOMATIC, FULL, *PRESETS})


class Wish(msgspec.Struct, frozen=True):
    """`preset`: `automatic`, `full`, `balanced`, `small`, or `custom`. `kept` is set for the last three."""

    preset: str = AUTOMATIC
    kept: Kept | None = None

    @property
    def key(self) -> str:
        """Tells wishes apart that give other snapshots.

        A wish for nothing in particular has the key `full`, the only retention there was before: what was read then
        is found again.
        """
        if self.preset == AUTOMATIC:
            return "full"
        if self.kept is None:
            return "whole"
        return ",".join(str(n) for n in msgspec.structs.astuple(self.kept)) if self.preset == CUSTOM else self.preset

    def stored(self) -> dict[str, Any]:
        """For the document's row, and for people."""
        own = self.kept is not None and self.preset == CUSTOM
        return {"preset": self.preset} | (msgspec.to_builtins(self.kept) if own else {})


def parse_wish(text: str) -> Wish:
    """The wish of an upload; "" is none. Raises Invalid, which says what could be written instead."""
    text = text.strip()
    if not text or text in _NAMES:
        return _named(text or AUTOMATIC)
    try:
        return Wish(CUSTOM, msgspec.json.decode(text, type=Kept))
    except msgspec.MsgspecError as error:
        reason = "" if isinstance(error, msgspec.DecodeError) and not _is_object(text) else f" ({error})"
        raise Invalid(f"{_FORM}{reason}.", param="retention") from None


def stored_wish(stored: dict[str, Any]) -> Wish:
    """The wish of a document's row."""
    preset = stored.get("preset", AUTOMATIC)
    if preset != CUSTOM:
        return _named(preset)
    return Wish(CUSTOM, msgspec.convert({name: stored[name] for name in Kept.__struct_fields__}, Kept))


def _named(preset: str) -> Wish:
    return Wish(preset, PRESETS.get(preset))


def _is_object(text: str) -> bool:
    return text.startswith("{")
