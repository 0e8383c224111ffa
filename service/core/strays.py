"""Work of this process by its rows, of which it knows nothing: it was committed, and the reply to that was lost.

The process lives, so no other one would ever take such work up.
"""

from collections.abc import Iterable

from service.core.clock import Clock


class Strays:
    """What has been unknown for `after_s` seconds: what is only just being begun is known a moment after its commit."""

    def __init__(self, clock: Clock, after_s: float) -> None:
        self._clock = clock
        self._after_s = after_s
        self._since: dict[str, float] = {}

    def due(self, unknown: Iterable[str]) -> list[str]:
        """Those of the ids that were given at each call for that long. They are told once."""
        now = self._clock.monotonic()
        self._since = {id: self._since.get(id, now) for id in unknown}
        due = [id for id, since in self._since.items() if now - since >= self._after_s]
        for id in due:
            del self._since[id]
        return due
