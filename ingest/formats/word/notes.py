"""Footnotes and endnotes of a Word document."""

from docx.document import Document
from docx.opc.constants import RELATIONSHIP_TYPE
from docx.oxml.parser import parse_xml

from ingest.formats.word.inline import read_paragraph
from ingest.formats.word.names import W


def read_notes(document: Document, kind: str) -> dict[str, str]:
    """The texts of footnotes or endnotes by their ids."""
    wanted = RELATIONSHIP_TYPE.FOOTNOTES if kind == "footnote" else RELATIONSHIP_TYPE.ENDNOTES
    notes: dict[str, str] = {}
    for relation in document.part.rels.values():
        if relation.reltype != wanted:
            continue
        for note in parse_xml(relation.target_part.blob).iterfind(W + kind):
            if note.get(W + "type", "normal") == "normal":
                paragraphs = [read_paragraph(element, lambda *_: 0).text for element in note.iter(W + "p")]
                notes[note.get(W + "id", "")] = " ".join(" ".join(paragraphs).split())
    return notes
