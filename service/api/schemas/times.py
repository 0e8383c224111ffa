"""Times as they are shown: UTC in ISO 8601."""

from datetime import UTC, datetime


def shown(seconds: float | None) -> datetime | None:
    """A stored time for a body; None stays None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def shown_exactly(seconds: float) -> datetime:
    """A stored time that is always there."""
    return datetime.fromtimestamp(seconds, UTC)
