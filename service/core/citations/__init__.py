"""Page-numbered citations by aligning each sentence of an answer with the document's own text: no retriever,
and no need for the model to quote exactly or to write citation marks."""

from service.core.citations.align import Citation, cite
from service.core.citations.index import PageIndex, PageText

__all__ = ["Citation", "PageIndex", "PageText", "cite"]
