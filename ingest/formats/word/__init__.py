"""Word documents (DOCX) through python-docx: what a reader sees, in the order of the text."""

from ingest.formats.word.body import WordText, read_word

__all__ = ["WordText", "read_word"]
