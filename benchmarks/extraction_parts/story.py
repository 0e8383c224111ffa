"""What the documents of the corpus say, apart from any format, and the words a reader should find in them."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["title", "heading", "para", "bullets", "numbers", "table", "note", "break", "code", "quote"]


@dataclass(frozen=True)
class Block:
    """`text` of headings, paragraphs, notes and code; `items` of lists; `rows` of tables."""

    kind: Kind
    text: str = ""
    items: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def said(self) -> str:
        """All its words in the order of reading."""
        return "\n".join([self.text, *self.items, *(" ".join(row) for row in self.rows)])


@dataclass(frozen=True)
class Story:
    blocks: tuple[Block, ...]
    extra: str = ""
    """Words that a format adds by its conventions, such as numbers of lists."""

    @property
    def said(self) -> str:
        return "\n".join(block.said for block in self.blocks)

    @property
    def paragraphs(self) -> list[str]:
        return [block.text for block in self.blocks if block.kind == "para"]


@dataclass(frozen=True)
class Made:
    """A file of the corpus: its bytes, the text it shows, and its pages where the format fixes their number."""

    data: bytes
    truth: str
    n_pages: int | None = None
    labels: tuple[str, ...] = field(default=())


def para(text: str) -> Block:
    return Block("para", text)


def heading(text: str) -> Block:
    return Block("heading", text)


ENGLISH = (
    "The harbour company keeps two dredgers at the northern quay, and both are inspected in the first week of March. "
    "When a dredger fails its inspection, the master of the port is told on the same day, and no vessel deeper than "
    "six metres may enter before the second inspection has been passed and entered in the register.",
    "Every skipper pays a berth fee of EUR 4,500 a year. The fee falls due within thirty days after the invoice was "
    "sent, and interest of 2.5 percent a month is added to what is paid "
    "later. Vessels of the pilot service pay nothing, nor "
    "do vessels that were called in to fight a fire.",
    "The lighthouse keeper writes down the weather at six in the morning, at noon, and at nine in the evening. His "
    "notes go to the office in Marlow Street, where they are bound once a year; the volumes since 1911 are complete, "
    "with the exception of that for 1944, which was lost in a flood.",
    "Ropes that show wear over more than a tenth of their length are taken out of use at once. They are cut, so that "
    "nobody can use them by mistake, and the pieces are given to the museum, which sells them to visitors.",
    "In the event of fog the horn sounds four times a minute. Ferries leave at half speed then, and the passengers are "
    "told before they buy a ticket that the crossing may take an hour longer than the timetable says.",
    "The archive is open on weekdays from ten to four. Readers who wish to see a chart older than 1850 ask for it two "
    "days before their visit, wear gloves, and use a pencil; photographs are allowed, a flash is not.",
    "A crane may lift no more than eighteen tonnes at a reach of twelve metres. Its driver is answerable for the load "
    "until it stands on the ground, and for the chain until it hangs free again.",
    "The council voted on the new breakwater in its session of 14 October. Nine members were in favour, four were "
    "against, and two abstained because their families own land beside the building site.",
)
GERMAN = (
    "Der Mietvertrag beginnt am 1. März und läuft auf unbestimmte Zeit. Die Kündigungsfrist beträgt drei Monate; für "
    "größere Schäden haftet der Mieter nur, wenn er sie grob fahrlässig verursacht hat. Über Änderungen der "
    "Hausordnung beschließt die Eigentümerversammlung jährlich.",
    "Sämtliche Schlüssel sind bei der Übergabe vollständig zurückzugeben. Fehlende Schlüssel werden auf Kosten des "
    "Mieters ersetzt, einschließlich der Schließzylinder, soweit dies für die Sicherheit des Gebäudes nötig ist.",
)
FRENCH = (
    "L'assemblée générale s'est réunie à l'hôtel de ville où le maire a présenté le budget. Les recettes s'élèvent à "
    "12 500 euros, les dépenses à 11 800 ; le reste sera versé à l'œuvre de bienfaisance dès l'été.",
)
POLISH = ("Wójt gminy zażądał, aby każdy właściciel łąki złożył oświadczenie przed końcem października.",)
GREEK = ("Η συμφωνία ισχύει για πέντε έτη και ανανεώνεται αυτόματα, εκτός αν καταγγελθεί εγγράφως.",)
RUSSIAN = ("Арендатор обязан вернуть ключи в день окончания договора, иначе взимается плата за каждый день.",)
CHINESE = ("本合同自签署之日起生效，有效期为三年。乙方应当在收到发票后三十日内付款，逾期按每日万分之五支付违约金。",)
JAPANESE = ("利用者は毎月末日までに料金を支払うものとします。遅れた場合は年六分の利息がかかります。",)

FEES = (
    ("Vessel", "Length", "Fee"),
    ("Pilot boat", "12 m", "0"),
    ("Trawler", "24 m", "4,500"),
    ("Coaster", "70 m", "18,250"),
    ("Ferry", "95 m", "31,000"),
)
DUTIES = ("Check the ropes", "Sound the horn in fog", "Enter the weather in the register")
STEPS = ("Ring the bell", "Lower the flag", "Close the northern gate")


def report() -> Story:
    """A short report with everything that a report has but notes."""
    return Story(
        (
            Block("title", "Rules of the Harbour"),
            heading("Inspections"),
            para(ENGLISH[0]),
            para(ENGLISH[3]),
            Block("bullets", items=DUTIES),
            heading("Fees"),
            para(ENGLISH[1]),
            Block("table", rows=FEES),
            heading("Records"),
            para(ENGLISH[2]),
            Block("numbers", items=STEPS),
            para(ENGLISH[5]),
        )
    )


def prose(*paragraphs: str) -> Story:
    return Story(tuple(para(text) for text in paragraphs))


def long_story(n_chapters: int) -> Story:
    """Chapters of three paragraphs each; each has words of its own."""
    blocks: list[Block] = []
    for number in range(1, n_chapters + 1):
        blocks.append(heading(f"Chapter {number}"))
        texts = [ENGLISH[(number + step) % len(ENGLISH)] for step in range(3)]
        blocks += [para(f"Entry {number * 100 + step}. {text}") for step, text in enumerate(texts)]
    return Story(tuple(blocks))
