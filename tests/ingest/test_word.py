"""Word documents: what is counted, what is left out, and where pages end."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import docx
import pytest
from docx.oxml import OxmlElement
from docx.oxml.ns import qn

from benchmarks.extraction_parts.story import report
from benchmarks.extraction_parts.word_files import W, repacked, saved, written
from ingest.extract import extract
from ingest.formats.sections import Section, paginate
from ingest.formats.word.numbering import written as in_format
from ingest.limits import ParseLimits
from ingest.wire import Finished, Opened, PageRead

Put = Callable[[bytes], Path]


def read(path: Path) -> tuple[list[str], Opened, list[str]]:
    messages = list(extract(path, ParseLimits()))
    assert isinstance(messages[0], Opened)
    assert isinstance(messages[-1], Finished)
    return [message.text for message in messages if isinstance(message, PageRead)], messages[0], messages[-1].warnings


@pytest.mark.parametrize(
    ("count", "form", "expected"),
    [
        (4, "decimal", "4"), (4, "lowerRoman", "iv"), (1994, "upperRoman", "MCMXCIV"), (27, "lowerLetter", "aa"),
        (3, "upperLetter", "C"), (7, "decimalZero", "07"), (1, "none", ""), (5, "chineseCounting", "5"),
        (0, "lowerRoman", "0"), (-2, "lowerLetter", "-2"), (10**9, "upperRoman", "1000000000"),
    ],
)  # fmt: skip
def test_numbers_are_written_as_the_list_wants(count: int, form: str, expected: str):
    assert in_format(count, form) == expected


def test_a_report_reads_like_markdown(put: Put):
    (page,), opened, _ = read(put(saved(written(report()))))
    assert page.startswith("# Rules of the Harbour\n\n# Inspections\n\nThe harbour company")
    assert "- Check the ropes\n- Sound the horn in fog\n- Enter the weather in the register\n\n# Fees" in page
    assert "| Vessel | Length | Fee |\n| --- | --- | --- |\n| Pilot boat | 12 m | 0 |\n" in page
    assert "1. Ring the bell\n2. Lower the flag\n" in page
    assert opened.title == "Rules of the Harbour"


def test_the_title_is_that_of_its_properties(put: Put):
    document = docx.Document()
    document.core_properties.title = "Port & Rules"
    document.add_heading("Something else", 1)
    assert read(put(saved(document)))[1].title == "Port & Rules"


def _field(paragraph, instruction: str, shown: str) -> None:
    """As Word writes a field: marks between runs."""
    for kind in ("begin", None, "separate", "shown", "end"):
        run = paragraph.add_run(shown if kind == "shown" else "")
        if kind == "shown":
            continue
        mark = OxmlElement("w:fldChar" if kind else "w:instrText")
        if kind:
            mark.set(qn("w:fldCharType"), kind)
        else:
            mark.text = f" {instruction} "
        run._r.append(mark)


def test_headers_and_footers_are_said_once_where_their_section_begins(put: Put):
    document = docx.Document()
    document.add_heading("Lease", 1)
    document.add_paragraph("The rent is due monthly.")
    first = document.sections[0]
    first.header.paragraphs[0].text = "Acme Estates\tRef. LX-4711"
    numbers = first.footer.paragraphs[0]
    numbers.add_run("Page ")
    _field(numbers, "PAGE", "7")
    numbers.add_run(" of ")
    _field(numbers, "NUMPAGES", "12")
    signed = first.footer.add_paragraph("Confidential, page ")
    _field(signed, "PAGE  \\* MERGEFORMAT", "7")
    first.first_page_header.paragraphs[0].text = "Not shown: the first page is as the others"
    first.even_page_header.paragraphs[0].text = "Not shown either"
    document.add_section()
    document.add_heading("Annex", 1)
    document.add_paragraph("The keys.")
    third = document.add_section()
    third.different_first_page_header_footer = True
    third.first_page_header.paragraphs[0].text = "Acme Archive"  # that of the first section, which did not show it
    third.header.is_linked_to_previous = False
    third.header.paragraphs[0].text = "Acme Estates\tRef. LX-4711"
    document.add_paragraph("The end.")
    pages, _, warnings = read(put(saved(document)))
    assert pages == [
        "# Lease\n\n[Header: Acme Estates Ref. LX-4711]\n\n[Footer: Confidential, page]\n\nThe rent is due monthly.",
        "# Annex\n\nThe keys.",
        "The end.\n\n[Header: Acme Archive]",
    ]
    assert warnings == []


def test_a_letterhead_in_a_table_is_read_and_even_pages_have_their_own(put: Put):
    document = docx.Document()
    document.add_paragraph("Dear Marta,")
    document.settings.odd_and_even_pages_header_footer = True
    section = document.sections[0]
    table = section.header.add_table(1, 2, docx.shared.Cm(12))
    table.cell(0, 0).text, table.cell(0, 1).text = "Lighthouse Trust", "12 Pier Road"
    section.even_page_footer.paragraphs[0].text = "Charity no. 88"
    pages, _, _ = read(put(saved(document)))
    assert pages == ["Dear Marta,\n\n[Header: Lighthouse Trust\n12 Pier Road]\n\n[Footer: Charity no. 88]"]


def test_a_header_that_is_damaged_or_missing_costs_only_itself(put: Put):
    document = docx.Document()
    document.add_paragraph("The text.")
    document.sections[0].header.paragraphs[0].text = "Gone"
    document.sections[0].footer.paragraphs[0].text = "Here"
    (name,) = [name for name in zipfile.ZipFile(io.BytesIO(saved(document))).namelist() if "word/header" in name]
    damaged = repacked(saved(document), lambda part, data: b"<w:hdr" if part == name else data)
    pages, _, warnings = read(put(damaged))
    assert pages == ["The text.\n\n[Footer: Here]"]
    assert warnings == ["1 header or footer could not be read."]
    missing = repacked(saved(document), lambda _, data: data.replace(name.removeprefix("word/").encode(), b"gone.xml"))
    pages, _, warnings = read(put(missing))
    assert pages == ["The text.\n\n[Footer: Here]"]
    assert warnings == []


def test_comments_and_files_inside_are_said_to_be_left_out(put: Put):
    document = docx.Document()
    paragraph = document.add_paragraph("The fee")
    document.add_comment(paragraph.runs, text="Is this right?", author="a")
    included = OxmlElement("w:altChunk")
    included.set(qn("r:id"), "x")
    document.element.body.insert(0, included)
    pages, _, warnings = read(put(saved(document)))
    assert pages == ["The fee"]
    assert warnings == [
        "1 comment in the margin cannot be asked about.",
        "1 file inside the document cannot be asked about.",
    ]


def test_a_blank_page_keeps_its_number(put: Put):
    document = docx.Document()
    document.add_paragraph("first")
    document.add_page_break()
    document.add_page_break()
    document.add_paragraph("third")
    assert read(put(saved(document)))[0] == ["first", "", "third"]


def test_a_break_that_word_has_laid_out_after_one_of_the_author_is_the_same(put: Put):
    document = docx.Document()
    document.add_paragraph("first")
    document.add_page_break()
    run = document.add_paragraph().add_run()
    run._r.append(OxmlElement("w:lastRenderedPageBreak"))
    run.add_text("second")
    assert read(put(saved(document)))[0] == ["first", "second"]


def test_a_paragraph_that_wants_a_page_gets_one(put: Put):
    document = docx.Document()
    for text in ("first", "second"):
        document.add_paragraph(text).paragraph_format.page_break_before = True
    assert read(put(saved(document)))[0] == ["first", "second"]


def test_a_table_over_two_pages_is_cut_between_its_rows(put: Put):
    document = docx.Document()
    table = document.add_table(3, 2)
    for number, row in enumerate(table.rows):
        for cell in row.cells:
            cell.text = f"row {number}"
    table.rows[2].cells[0].paragraphs[0].runs[0]._r.insert(0, OxmlElement("w:lastRenderedPageBreak"))
    pages = read(put(saved(document)))[0]
    assert [page.count("row") for page in pages] == [4, 2]


def test_equations_symbols_and_boxes_to_tick(put: Put):
    inside = (
        '<w:p><m:oMath xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"><m:r><m:t>a=b</m:t></m:r>'
        "</m:oMath>"
        '<w:r><w:t xml:space="preserve"> and </w:t><w:sym w:font="Wingdings" w:char="F0FE"/><w:noBreakHyphen/>'
        '<w:sym w:font="Symbol" w:char="F0B3"/><w:sym w:font="MS Gothic" w:char="2612"/></w:r>'
        '<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:checkBox><w:default w:val="0"/></w:checkBox></w:ffData>'
        "</w:fldChar></w:r></w:p>"
    )
    data = repacked(saved(docx.Document()), lambda name, part: _body(inside) if name == "word/document.xml" else part)
    assert read(put(data))[0] == ["a=b and ☒-≥☒☐"]


def _body(inside: str) -> bytes:
    return f'<w:document xmlns:w="{W}"><w:body>{inside}</w:body></w:document>'.encode()


PICTURE = (
    '<w:drawing><wp:inline xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing"/>'
    "</w:drawing>"
)
LAID_OUT = "<w:lastRenderedPageBreak/>"


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([PICTURE, f"{LAID_OUT}<w:t>2</w:t>", LAID_OUT + PICTURE, f"{LAID_OUT}<w:t>4</w:t>"], ["", "2", "", "4"]),
        (['<w:br w:type="page"/>', f"{LAID_OUT}<w:t>2</w:t>"], ["", "2"]),
    ],
    ids=["pictures alone", "a cover"],
)
def test_a_page_without_text_counts(runs: list[str], expected: list[str], put: Put):
    inside = "".join(f"<w:p><w:r>{run}</w:r></w:p>" for run in runs)
    data = repacked(saved(docx.Document()), lambda name, part: _body(inside) if name == "word/document.xml" else part)
    assert read(put(data))[0] == expected


def _level(form: str, text: str, depth: int = 0, more: str = "") -> str:
    return (
        f'<w:lvl w:ilvl="{depth}"><w:start w:val="1"/><w:numFmt w:val="{form}"/>{more}'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
    )


def _numbered(levels: list[str], paragraphs: list[tuple[int, int, str]]) -> bytes:
    """A document with these lists, numbered from 1, and paragraphs "x" of (list, depth, properties of its end)."""
    lists = "".join(f'<w:abstractNum w:abstractNumId="{n}">{each}</w:abstractNum>' for n, each in enumerate(levels, 1))
    used = "".join(
        f'<w:num w:numId="{n}"><w:abstractNumId w:val="{n}"/></w:num>' for n, _ in enumerate(levels, start=1)
    )
    inside = "".join(
        f'<w:p><w:pPr><w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="{number}"/></w:numPr>'
        f"<w:rPr>{end}</w:rPr></w:pPr><w:r><w:t>x</w:t></w:r></w:p>"
        for number, depth, end in paragraphs
    )
    parts = {
        "word/document.xml": _body(inside),
        "word/numbering.xml": f'<w:numbering xmlns:w="{W}">{lists}{used}</w:numbering>'.encode(),
    }
    return repacked(saved(docx.Document()), lambda name, part: parts.get(name, part))


def test_sections_that_go_on_through_articles_are_numbered_as_word_does(put: Put):
    goes_on = '<w:lvlRestart w:val="0"/><w:isLgl/>'
    levels = _level("upperRoman", "Article %1.") + _level("decimal", "Section %1.%2", 1, goes_on)
    data = _numbered([levels], [(1, depth, "") for depth in (0, 1, 1, 0, 1)])
    assert read(put(data))[0][0].split("\n") == [
        "Article I. x",
        "  Section 1.1 x",
        "  Section 1.2 x",
        "Article II. x",
        "  Section 2.3 x",
    ]


def test_a_list_with_the_levels_of_a_style_is_one_with_it(put: Put):
    levels = ['<w:styleLink w:val="L"/>' + _level("decimal", "%1)"), '<w:numStyleLink w:val="L"/>']
    assert read(put(_numbered(levels, [(2, 0, ""), (2, 0, ""), (1, 0, "")])))[0] == ["1) x\n2) x\n3) x"]


def test_a_paragraph_whose_end_was_deleted_has_no_number(put: Put):
    deleted = '<w:del w:id="1" w:author="a"/>'
    (page,) = read(put(_numbered([_level("decimal", "%1)")], [(1, 0, ""), (1, 0, deleted), (1, 0, "")])))[0]
    assert [line for line in page.split("\n") if line] == ["1) x", "x", "2) x"]


def test_lists_that_are_nowhere_defined_are_paragraphs(put: Put):
    listed = '<w:pPr><w:numPr><w:ilvl w:val="x"/><w:numId w:val="77"/></w:numPr></w:pPr>'
    inside = f"<w:p>{listed}<w:r><w:t>a</w:t></w:r></w:p>"
    data = repacked(saved(docx.Document()), lambda name, part: _body(inside) if name == "word/document.xml" else part)
    assert read(put(data))[0] == ["a"]


def test_pages_of_a_laid_out_document_are_not_cut_at_headings():
    sections = [Section("x" * 2_000), Section("# Part", 1), Section("y" * 2_500), Section("z", starts_page=True)]
    assert [len(text) for _, text in paginate(sections, laid_out=True)] == [4_510, 1]
    assert [label for label, _ in paginate(sections)] == [None, "Part", "Part"]


def test_a_package_without_what_text_needs_not_is_read(put: Put):
    """No styles, no numbering, no properties."""
    names = {"word/document.xml", "[Content_Types].xml", "_rels/.rels"}
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(written(report())))) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in names:
            new.writestr(name, old.read(name))
    assert "dredgers at the northern quay" in read(put(buffer.getvalue()))[0][0]
