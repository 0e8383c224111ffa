"""The header `Idempotency-Key`."""

from typing import Annotated

from litestar.params import HeaderParameter

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        description="Of your choice: the same request with the same key is done once, for a day. Keys of questions are "
        "each session's own.",
    ),
]
