"""Small things about sentences."""


def some_pages(n: int, n_pages: int, one: str, more: str) -> str:
    """ "3 of 16 pages have", or "1 of 16 pages has": `one` and `more` are the verb's forms."""
    return f"{n:,} of {n_pages:,} page{'' if n_pages == 1 else 's'} {one if n == 1 else more}"


def counted(n: int, what: str) -> str:
    """ "1 file", "1,200 files"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"
