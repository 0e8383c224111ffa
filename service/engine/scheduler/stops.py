"""Stop strings: found across pieces, never shown, not even in part."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string; holds back an end that could be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._found = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was found: nothing comes after it."""
        if self._found:
            return "", True
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held, self._found = "", True
            return text[: min(found)], True
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def finish(self) -> str:
        """What was held back, when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
