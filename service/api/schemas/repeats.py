"""The header `Idempotency-Key`."""

from typing import Annotated

from litestar.params import HeaderParameter

from service.core.repeats import MAX_KEY_CHARS

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        description="Of your choice: the same request with the same key is done once, for a day. Keys of questions are "
        "each session's own.",
        # Told, not checked: the use case does, with its own words.
        schema_extra={"min_length": 1, "max_length": MAX_KEY_CHARS, "pattern": r"^[!-~]([ -~]*[!-~])?$"},
    ),
]
