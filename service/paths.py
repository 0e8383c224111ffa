"""Paths as people write them."""

from pathlib import Path

from service.errors import Invalid


def expanded(path: str | Path, what: str) -> Path:
    """With the home directory for `~` and `~user`. Raises Invalid, naming `what` it is, where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise Invalid(f"{what}: {path} names a home directory that is not known: give the path in full.") from None
