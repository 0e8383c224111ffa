"""Small things about sentences."""


def counted(n: int, noun: str) -> str:
    """A number with its noun: "1 page", "1,204 pages"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
