"""A document's pages as the token ids of its snapshot."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_store.fingerprint import token_digest
from ingest.model import Document, MediaType, Page, PageTokens
from ingest.tokenize import tokenize
from service.core.prompts import Prompts
from service.db.models import DocumentRow, PageRow


@dataclass(frozen=True, slots=True)
class SnapshotTokens:
    """`packed` are the ids as little-endian int32, `digest` names them, `template_digest` what made them."""

    ids: list[int]
    packed: bytes
    digest: str
    template_digest: str
    pages: Sequence[PageTokens] = ()


def unpack(packed: bytes) -> list[int]:
    """Token ids from their stored form."""
    return np.frombuffer(packed, "<i4").tolist()


def stored_document(row: DocumentRow, pages: Sequence[PageRow]) -> Document:
    """The document as it was read, from its stored text."""
    return Document(MediaType(row.media_type), tuple(Page(p.number, p.label, p.text) for p in pages))


async def tokenize_document(document: Document, prompts: Prompts) -> SnapshotTokens:
    """Tokens of template and pages, computed off the event loop."""
    template = prompts.template
    tokenized = await asyncio.to_thread(
        tokenize,
        document,
        prompts.tokenizer,
        prefix_ids=template.document_prefix_ids,
        suffix_ids=template.document_suffix_ids,
    )
    packed = np.asarray(tokenized.token_ids, "<i4").tobytes()
    return SnapshotTokens(tokenized.token_ids, packed, token_digest(packed), prompts.digest, tokenized.pages)
