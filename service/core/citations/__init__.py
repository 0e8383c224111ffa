"""Page-numbered citations by aligning each sentence of an answer with the document's own text, and by what the model
looked at while it wrote it: no retriever, and no need for the model to quote exactly or to write citation marks."""

from service.core.citations.attention import AnswerAttention, AnswerPiece, PageLook
from service.core.citations.cite import cite
from service.core.citations.index import PageIndex, PageText
from service.core.citations.model import Citation, Cited, Range

__all__ = ["AnswerAttention", "AnswerPiece", "Citation", "Cited", "PageIndex", "PageLook", "PageText", "Range", "cite"]
