"""Page-numbered citations by aligning each sentence of an answer with the document's own text: no retriever,
and no need for the model to quote exactly or to write citation marks."""

from service.core.citations.cite import cite
from service.core.citations.index import PageIndex, PageText
from service.core.citations.model import Citation, Cited, Range

__all__ = ["Citation", "Cited", "PageIndex", "PageText", "Range", "cite"]
