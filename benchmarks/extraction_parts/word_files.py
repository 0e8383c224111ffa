"""Word documents, by python-docx; what it cannot make is put into the package by hand."""

import io
import zipfile
from collections.abc import Callable

import docx
from docx.document import Document
from docx.enum.section import WD_SECTION
from docx.oxml import OxmlElement
from docx.oxml.ns import qn

from benchmarks.extraction_parts import story
from benchmarks.extraction_parts.story import Made, Story

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main"


def saved(document: Document) -> bytes:
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def written(told: Story) -> Document:
    document = docx.Document()
    for block in told.blocks:
        match block.kind:
            case "title":
                document.add_heading(block.text, 0)
            case "heading":
                document.add_heading(block.text, 1)
            case "bullets" | "numbers":
                style = "List Bullet" if block.kind == "bullets" else "List Number"
                for item in block.items:
                    document.add_paragraph(item, style)
            case "table":
                table = document.add_table(0, len(block.rows[0]))
                for row in block.rows:
                    for cell, text in zip(table.add_row().cells, row, strict=True):
                        cell.text = text
            case "break":
                document.add_page_break()
            case _:
                document.add_paragraph(block.text)
    return document


def counted(told: Story) -> str:
    """The truth of a document whose numbered lists show their numbers."""
    parts = []
    for block in told.blocks:
        if block.kind == "numbers":
            parts += [f"{number} {item}" for number, item in enumerate(block.items, start=1)]
        else:
            parts.append(block.said)
    return "\n".join(parts)


def repacked(data: bytes, change: Callable[[str, bytes], bytes], more: dict[str, bytes] | None = None) -> bytes:
    """The package with every part through `change`, and with more parts."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
        for name, part in (more or {}).items():
            new.writestr(name, part)
    return buffer.getvalue()


def report() -> Made:
    told = story.report()
    return Made(saved(written(told)), counted(told))


def paged() -> Made:
    """Page breaks set by the author, one page left blank."""
    document = docx.Document()
    texts = story.ENGLISH[:4]
    for number, text in enumerate(texts):
        if number:
            document.add_page_break()
        if number == 2:
            document.add_page_break()
        document.add_paragraph(text)
    return Made(saved(document), "\n".join(texts), 5)


def laid_out() -> Made:
    """With the marks of Word's own layout, one in the middle of a paragraph."""
    document = docx.Document()
    for text in story.ENGLISH[:3]:
        half = text.index(" ", len(text) // 2)
        first, second = text[:half], text[half:]
        paragraph = document.add_paragraph()
        paragraph.add_run(first)
        run = paragraph.add_run()
        run._r.append(OxmlElement("w:lastRenderedPageBreak"))
        paragraph.add_run(second)
    return Made(saved(document), "\n".join(story.ENGLISH[:3]), 4)


def sections() -> Made:
    document = docx.Document()
    document.add_paragraph(story.ENGLISH[0])
    document.add_section(WD_SECTION.NEW_PAGE)
    document.add_paragraph(story.ENGLISH[1])
    document.add_section(WD_SECTION.CONTINUOUS)
    document.add_paragraph(story.ENGLISH[2])
    return Made(saved(document), "\n".join(story.ENGLISH[:3]), 2)


def merged_table() -> Made:
    """Cells over columns and rows, a table in a cell, and a cell of two paragraphs."""
    document = docx.Document()
    table = document.add_table(4, 3)
    rows = (("Port", "Fees", ""), ("North", "2024", "1,200"), ("", "2025", "1,300"), ("South", "2024", "900"))
    for row, texts in zip(table.rows, rows, strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    table.cell(0, 1).merge(table.cell(0, 2)).text = "Fees"
    table.cell(1, 0).merge(table.cell(2, 0)).text = "North"
    table.cell(3, 0).add_paragraph("closed in winter")
    table.cell(3, 1).add_table(1, 2).rows[0].cells[1].text = "inner"
    truth = "Port Fees North 2024 1,200 North 2025 1,300 South closed in winter 2024 inner 900"
    return Made(saved(document), truth)


def _field(paragraph, name: str, **attributes: str):
    element = OxmlElement(name)
    for key, text in attributes.items():
        element.set(qn(f"w:{key}"), text)
    paragraph._p.append(element)
    return element


def changes() -> Made:
    """Tracked changes, hidden text, a field, a content control, a hyperlink."""
    document = docx.Document()
    paragraph = document.add_paragraph("The fee is ")
    deleted = _field(paragraph, "w:del", id="1", author="a")
    run = OxmlElement("w:r")
    gone = OxmlElement("w:delText")
    gone.text = "nine hundred"
    run.append(gone)
    deleted.append(run)
    inserted = _field(paragraph, "w:ins", id="2", author="a")
    inserted.append(document.add_paragraph("two thousand").runs[0]._r)
    paragraph.add_run(" euros").font.hidden = False
    paragraph.add_run(" and secretly more").font.hidden = True
    fields = document.add_paragraph("Page ")
    for kind in ("begin", "separate", "end"):
        field = fields.add_run()
        char = OxmlElement("w:fldChar")
        char.set(qn("w:fldCharType"), kind)
        field._r.append(char)
        if kind == "begin":
            code = OxmlElement("w:instrText")
            code.text = " PAGE "
            field._r.append(code)
        if kind == "separate":
            fields.add_run("seventeen")
    link = _field(document.add_paragraph("See "), "w:hyperlink", anchor="x")
    link.append(document.add_paragraph("the annex").runs[0]._r)
    control = OxmlElement("w:sdt")
    content = OxmlElement("w:sdtContent")
    content.append(document.add_paragraph("Name of the holder: Ada Finch")._p)
    control.append(content)
    document.element.body.insert(len(document.element.body) - 1, control)
    truth = "The fee is two thousand euros Page seventeen See the annex Name of the holder: Ada Finch"
    return Made(saved(document), truth)


def clauses() -> Made:
    """Numbers that are counted, not written: 1, 1.1, (a), with a restart."""
    levels = (("decimal", "%1."), ("decimal", "%1.%2"), ("lowerLetter", "(%3)"), ("upperRoman", "%4."))
    body = "".join(
        f'<w:lvl w:ilvl="{depth}"><w:start w:val="1"/><w:numFmt w:val="{form}"/><w:lvlText w:val="{text}"/></w:lvl>'
        for depth, (form, text) in enumerate(levels)
    )
    numbering = (
        f'<w:numbering xmlns:w="{W}"><w:abstractNum w:abstractNumId="90">{body}</w:abstractNum>'
        '<w:num w:numId="90"><w:abstractNumId w:val="90"/></w:num><w:num w:numId="91"><w:abstractNumId w:val="90"/>'
        '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="5"/></w:lvlOverride></w:num></w:numbering>'
    )
    lines = (
        ("90", 0, "Definitions", "1."), ("90", 1, "The port", "1.1"), ("90", 1, "The master", "1.2"),
        ("90", 2, "by day", "(a)"), ("90", 2, "by night", "(b)"), ("90", 3, "with lamps", "I."),
        ("90", 0, "Fees", "2."),
        ("90", 1, "Berths", "2.1"), ("91", 0, "Annex", "5."), ("91", 0, "Signatures", "6."),
    )  # fmt: skip
    document = docx.Document()
    for num_id, depth, text, _ in lines:
        properties = document.add_paragraph(text)._p.get_or_add_pPr().get_or_add_numPr()
        properties.get_or_add_numId().val = int(num_id)
        properties.get_or_add_ilvl().val = depth
    data = repacked(saved(document), lambda name, part: numbering.encode() if name == "word/numbering.xml" else part)
    return Made(data, " ".join(f"{mark} {text}" for _, _, text, mark in lines))


def notes() -> Made:
    """Footnotes and endnotes, as Word keeps them in parts of their own."""
    document = docx.Document()
    first = document.add_paragraph("The fee was doubled")
    second = document.add_paragraph("The horn was renewed")
    for paragraph, kind, number in ((first, "footnote", "2"), (second, "endnote", "2")):
        reference = OxmlElement(f"w:{kind}Reference")
        reference.set(qn("w:id"), number)
        paragraph.add_run()._r.append(reference)
    parts, relations = {}, ""
    for kind, text in (("footnote", "By vote of 14 October."), ("endnote", "Paid by the museum.")):
        parts[f"word/{kind}s.xml"] = (
            f'<w:{kind}s xmlns:w="{W}"><w:{kind} w:type="separator" w:id="0"><w:p/></w:{kind}><w:{kind} w:id="2"><w:p>'
            f"<w:r><w:{kind}Ref/></w:r><w:r><w:t>{text}</w:t></w:r></w:p></w:{kind}></w:{kind}s>"
        ).encode()
        kinds = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
        relations += f'<Relationship Id="n{kind}" Type="{kinds}/{kind}s" Target="{kind}s.xml"/>'

    def change(name: str, part: bytes) -> bytes:
        if name != "word/_rels/document.xml.rels":
            return part
        return part.replace(b"</Relationships>", relations.encode() + b"</Relationships>")

    truth = (
        "The fee was doubled 1 Footnote 1: By vote of 14 October. The horn was renewed 1 Endnote 1: Paid by the museum."
    )
    return Made(repacked(saved(document), change, parts), truth)


def boxed() -> Made:
    """A text box, which is there twice for old readers, and a described picture."""
    box = (
        f'<w:r xmlns:w="{W}" xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"><mc:AlternateContent>'
        '<mc:Choice Requires="wps"><w:drawing><w:txbxContent><w:p><w:r><w:t>Mind the crane</w:t></w:r></w:p>'
        "</w:txbxContent></w:drawing></mc:Choice><mc:Fallback><w:pict><w:txbxContent><w:p><w:r>"
        "<w:t>Mind the crane</w:t></w:r></w:p></w:txbxContent></w:pict></mc:Fallback></mc:AlternateContent></w:r>"
    )
    document = docx.Document()
    document.add_paragraph("MARK")
    document.add_paragraph(story.ENGLISH[6])
    data = saved(document)
    marked = b"<w:r><w:t>MARK</w:t></w:r>"
    return Made(
        repacked(data, lambda _, part: part.replace(marked, box.encode())), f"Mind the crane\n{story.ENGLISH[6]}"
    )


def strict() -> Made:
    """The variant with other names ("Strict Open XML"), a reference that leads nowhere, and a picture nobody needs."""
    told = story.report()
    relation = (
        b'<Relationship Id="gone" Type="http://purl.oclc.org/ooxml/officeDocument/relationships/image" Target="NULL"/>'
    )

    def change(name: str, part: bytes) -> bytes:
        part = part.replace(W.encode(), STRICT.encode())
        official = b"http://schemas.openxmlformats.org/officeDocument/2006/relationships"
        part = part.replace(official, b"http://purl.oclc.org/ooxml/officeDocument/relationships")
        if name == "word/_rels/document.xml.rels":
            part = part.replace(b"</Relationships>", relation + b"</Relationships>")
        return part

    return Made(repacked(saved(written(told)), change, {"word/media/image9.png": b"\x89PNG"}), counted(told))


def languages() -> Made:
    texts = (*story.GERMAN, *story.FRENCH, *story.POLISH, *story.GREEK, *story.RUSSIAN, *story.CHINESE, *story.JAPANESE)
    return Made(saved(written(story.prose(*texts))), "\n".join(texts))


def long() -> Made:
    told = story.long_story(30)
    return Made(saved(written(told)), told.said)


FILES: dict[str, Callable[[], Made]] = {
    "report with lists and a table": report,
    "page breaks and a blank page": paged,
    "pages as Word laid them out": laid_out,
    "sections": sections,
    "merged cells, nested table": merged_table,
    "changes, hidden text, fields": changes,
    "counted clauses": clauses,
    "footnotes and endnotes": notes,
    "text box": boxed,
    "strict variant, lost reference": strict,
    "eight languages": languages,
    "thirty chapters": long,
}
