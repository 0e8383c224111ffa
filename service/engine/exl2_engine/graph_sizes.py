"""For which sizes of a decode step graphs are captured; without torch, for whoever plans memory."""

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (4096, 32768)
"""Bounds on documents' tokens besides the largest document: how many parts a document is cut into follows from it."""
DRAFT_TOKENS = 7
"""Drafts of a sequence in a step at most. With its last token they are 8 rows, which take a step of 27B about a fifth
longer than one row does."""
DRAFT_ROWS = 16
"""Rows of all sequences of a step up to which drafts are cheap: as many as one tile of our product, and as fit one tile
of attention with up to 8 query heads for each KV head."""

FIRST_TILE = 16
"""Queries of the smallest tile of attention (`kernels.attend.query_tile`)."""


def bounds(steps: tuple[int, ...], most: int) -> list[int]:
    """Those of `steps` below `most`, and `most`: sizes that graphs are made for."""
    return [n for n in steps if n < most] + [most]


def step_rows(max_rows: int, draft_tokens: int, group_heads: int, draft_rows: int = DRAFT_ROWS) -> list[int]:
    """The numbers of rows that graphs are captured for: up to one of each of `max_rows` sequences, with drafts behind
    them as long as the step has at most `draft_rows` rows. With drafts there is a graph of as many rows as fill the
    first tile of attention with `group_heads` query heads for each KV head: one row more takes a longer step."""
    most = max(max_rows, min(draft_rows, max_rows * (1 + draft_tokens)))
    first_tile = min(max(FIRST_TILE // group_heads, 1), most) if draft_tokens else most
    return sorted({*bounds(ROWS, most), first_tile})
