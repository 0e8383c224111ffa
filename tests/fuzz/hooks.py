"""What schemathesis cannot know: files that can be read, and the ids of documents that are there."""

import os
from random import Random
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import HookContext

from tests.fuzz.seeds import NAMES, seeds

DOCUMENTS = "FUZZ_DOCUMENTS"
"""A variable of the environment: ids with blanks between."""

schemathesis.openapi.format(
    "binary",
    st.one_of(
        st.sampled_from([data for name in NAMES for data in seeds(name) if len(data) < 5_000]),
        st.text(min_size=1).map(lambda text: text.encode(errors="replace")),
        st.binary(),
    ),
)


@schemathesis.hook
def map_body(context: HookContext, body: Any) -> Any:
    """Half of the new sessions are over a document that is there."""
    ids = os.environ.get(DOCUMENTS, "").split()
    chance = Random(repr(body))
    if isinstance(body, dict) and isinstance(body.get("document_ids"), list) and ids and chance.random() < 0.5:
        return {**body, "document_ids": [chance.choice(ids)]}
    return body
