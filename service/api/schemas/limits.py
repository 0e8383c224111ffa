"""Limits of fields as the OpenAPI description tells them. They are checked where the fields are used, so that each has
its own message."""

from typing import Any

import msgspec

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]*$"
"""Text of one line without what turns its direction."""
SAID_SOMETHING = r"\S"
"""Something else than white space."""


def limited(**schema: Any) -> msgspec.Meta:
    """For `Annotated`: told, not checked."""
    return msgspec.Meta(extra_json_schema=schema)
