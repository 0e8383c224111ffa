"""Who may start an answer: one at a time per session, a bounded number over all sessions.

The engine runs what is admitted in the order of arrival, so nobody waits longer than the bound; whoever
comes when it is full is told when to come back, from how long recent answers took.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable

from service.errors import Busy, Conflict

_RECENT = 32
_MAX_RETRY_AFTER_S = 120
SESSION_BUSY = "This session is still answering a question: wait for it to end, or fork the session."


class Ticket:
    """The right to run one answer. `leave` gives it back; a second call does nothing."""

    def __init__(self, admission: "Admission", session_id: str) -> None:
        self._admission = admission
        self.session_id = session_id
        self._valid = True

    def leave(self, seconds: float | None = None) -> None:
        """Free the place; `seconds` is how long an answer that ran took."""
        if self._valid:
            self._valid = False
            self._admission._leave(self.session_id, seconds)


class Admission:
    """Counts admitted answers (running and waiting). Not thread-safe: used from the event loop only."""

    def __init__(self, limit: int, *, parallel: Callable[[], int] = lambda: 1) -> None:
        self._limit = limit
        self._parallel = parallel
        self._sessions: set[str] = set()
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    @property
    def admitted(self) -> int:
        """Answers that run or wait now."""
        return len(self._sessions)

    @property
    def limit(self) -> int:
        return self._limit

    def enter(self, session_id: str) -> Ticket:
        """A ticket for one answer of the session.

        Raises Conflict (``session_busy``) when the session has an answer running, Busy when the queue is
        full.
        """
        if session_id in self._sessions:
            raise Conflict(SESSION_BUSY, code="session_busy")
        if len(self._sessions) >= self._limit:
            raise Busy(
                f"{len(self._sessions)} answers are running or waiting, which is the limit of this server.",
                retry_after_s=self.retry_after_s(),
            )
        self._sessions.add(session_id)
        return Ticket(self, session_id)

    def take_over(self, session_id: str) -> Ticket:
        """A ticket for an answer that another process had admitted."""
        self._sessions.add(session_id)
        return Ticket(self, session_id)

    def is_busy(self, session_id: str) -> bool:
        return session_id in self._sessions

    def retry_after_s(self) -> int:
        """Whole seconds until a place is likely free: the median of recent answers, shared by the running
        ones."""
        usual = statistics.median(self._seconds) if self._seconds else 2.0
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(usual / max(1, min(self._parallel(), self._limit)))))

    def _leave(self, session_id: str, seconds: float | None) -> None:
        self._sessions.discard(session_id)
        if seconds is not None:
            self._seconds.append(seconds)
