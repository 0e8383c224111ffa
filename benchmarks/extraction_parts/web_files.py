"""HTML pages, well written and not."""

from collections.abc import Callable
from html import escape

from benchmarks.extraction_parts import story
from benchmarks.extraction_parts.story import Made, Story
from benchmarks.extraction_parts.word_files import counted


def body_of(told: Story) -> str:
    """The story as elements."""
    parts = []
    for block in told.blocks:
        match block.kind:
            case "title":
                parts.append(f"<h1>{escape(block.text)}</h1>")
            case "heading":
                parts.append(f"<h2>{escape(block.text)}</h2>")
            case "bullets" | "numbers":
                name = "ul" if block.kind == "bullets" else "ol"
                items = "".join(f"<li>{escape(item)}</li>" for item in block.items)
                parts.append(f"<{name}>{items}</{name}>")
            case "table":
                rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in block.rows]
                parts.append("<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>")
            case _:
                parts.append(f"<p>{escape(block.text)}</p>")
    return "\n".join(parts)


def page(body: str, head: str = "") -> str:
    return f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{head}</head><body>{body}</body></html>'


def report() -> Made:
    told = story.report()
    return Made(page(body_of(told), "<title>Harbour</title>").encode(), counted(told))


def noisy() -> Made:
    """Scripts, styles, comments, hidden parts, frames and pictures by address: none of it is text."""
    noise = (
        "<script>var fee = 'script text'; document.write('<p>written</p>')</script><style>p { color: red }</style>"
        "<!-- a comment about fees --><template><p>template text</p></template><noscript>Enable scripts</noscript>"
        '<iframe src="https://example.org/frame.html">frame</iframe><div hidden>hidden text</div>'
        '<p style="color:red; display: none">invisible order</p><svg><text>drawn</text></svg>'
        '<img src="https://example.org/pixel.png"><link rel="stylesheet" href="https://example.org/a.css">'
    )
    told = story.report()
    return Made(page(noise + body_of(told) + noise).encode(), counted(told))


def broken() -> Made:
    """Elements that are never closed, or closed in the wrong order."""
    one, two, three, four = (escape(text) for text in story.ENGLISH[:4])
    body = f"<p>{one}<p><b><i>{two}</b></i><div>{three}</span><ul><li>one<li>two</ul>{four}"
    truth = "\n".join([*story.ENGLISH[:3], "one two", story.ENGLISH[3]])
    return Made(f"<html><title>x</title>{body}".encode(), truth)


def inline() -> Made:
    body = (
        "<p>The <b>har</b>bour <a href='/x'>company</a> keeps&nbsp;two <em>dredgers</em>,<br>and co&shy;operates "
        "with&#32;the port; H<sub>2</sub>O &lt;&amp;&gt; caf&eacute; &#8364;5.</p><p>A <q>quoted</q> word<wbr>break</p>"
    )
    truth = "The harbour company keeps two dredgers, and cooperates with the port; H2O café 5 A quoted wordbreak"
    return Made(page(body).encode(), truth)


def tables() -> Made:
    """Cells over rows and columns, a head, a caption."""
    body = (
        "<table><caption>Fees</caption><thead><tr><th>Port<th>Year<th>Fee</thead><tbody>"
        "<tr><td rowspan=2>North<td>2024<td>1,200<tr><td>2025<td>1,300<tr><td colspan=2>South, all years<td>900"
        "<tr><td>East<td><p>2024</p><ul><li>January<li>June</ul><td>700</table>"
    )
    truth = "Fees Port Year Fee North 2024 1,200 North 2025 1,300 South, all years 900 East 2024 January June 700"
    return Made(page(body).encode(), truth)


def laid_out_by_tables() -> Made:
    """As pages and letters were made long ago: tables in tables, to put things in places."""
    told = story.report()
    inner = body_of(told)
    within = f"<table><tr><td>Menu</td><td>{inner}</td></tr></table>"
    body = f"<table><tr><td>Port of Marlow</td></tr><tr><td>{within}</td></tr></table>"
    return Made(page(body).encode(), f"Port of Marlow\nMenu\n{counted(told)}")


def latin() -> Made:
    text = story.GERMAN[0]
    head = '<meta http-equiv="Content-Type" content="text/html; charset=ISO-8859-1">'
    source = f"<html><head>{head}</head><body><p>{text}</p>"
    return Made(source.encode("latin-1"), text)


def russian_named() -> Made:
    text = " ".join(story.RUSSIAN * 3)
    return Made(f'<html><head><meta charset="windows-1251"></head><body><p>{text}</p>'.encode("cp1251"), text)


def utf16() -> Made:
    text = "\n".join((*story.GREEK, *story.CHINESE, *story.JAPANESE))
    return Made(page("".join(f"<p>{line}</p>" for line in text.split("\n"))).encode("utf-16"), text)


def xhtml() -> Made:
    told = story.report()
    source = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Strict//EN" '
        '"http://www.w3.org/TR/xhtml1/DTD/xhtml1-strict.dtd">\n<html xmlns="http://www.w3.org/1999/xhtml"><head>'
        f"<title>Harbour</title></head><body><div>{body_of(told)}</div></body></html>"
    )
    return Made(source.encode(), counted(told))


def fragment() -> Made:
    told = story.report()
    return Made(body_of(told).encode(), counted(told))


def form() -> Made:
    body = (
        '<form><label>Name <input name=n value="Ada Finch"></label><input type=hidden value=secret><p>Member '
        "<input type=checkbox checked> yes</p><textarea>Berth 12, please</textarea>"
        "<input type=submit value=Send></form>"
    )
    return Made(page(body).encode(), "Name Ada Finch Member yes Berth 12, please")


def long() -> Made:
    told = story.long_story(60)
    return Made(page(body_of(told), "<title>All chapters</title>").encode(), told.said)


FILES: dict[str, Callable[[], Made]] = {
    "report": report,
    "scripts, styles and hidden parts": noisy,
    "unclosed elements": broken,
    "inline elements and entities": inline,
    "tables with spans": tables,
    "layout by tables": laid_out_by_tables,
    "ISO 8859-1": latin,
    "windows-1251": russian_named,
    "UTF-16": utf16,
    "XHTML": xhtml,
    "without a frame": fragment,
    "form": form,
    "sixty chapters": long,
}
