"""Questions about real documents, with what a right answer says and words by which a page with the fact is known.

They were written from the documents' text before any answer was seen.
"""

import gzip
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_report import ROOT

CONTRACT = ROOT / "examples" / "contract"
INSTALL = "apt-get install libtasn1-doc zlib1g-dev bzip2-doc"


@dataclass(frozen=True, slots=True)
class Case:
    """`values`: one of them is in a right answer. `facts`: a page with one of them has the fact; `page`: the only one
    that has it. A refusal is right where there is neither."""

    question: str
    values: tuple[str, ...]
    facts: tuple[str, ...] = ()
    page: int | None = None

    @property
    def has_answer(self) -> bool:
        return bool(self.facts) or self.page is not None

    def holds(self, number: int, text: str) -> bool:
        """Whether a page has the fact."""
        return number == self.page or any(folded(fact) in folded(text) for fact in self.facts)


@dataclass(frozen=True, slots=True)
class Source:
    """A document, the package that installs it, and its questions."""

    name: str
    package: str
    path: Path
    cases: Sequence[Case]

    def read(self) -> bytes:
        """Raises SystemExit with what to install when it is not there."""
        if not self.path.exists():
            raise SystemExit(f"{self.path} is not there: {INSTALL}")
        data = self.path.read_bytes()
        return gzip.decompress(data) if self.path.suffix == ".gz" else data


def folded(text: str) -> str:
    """For comparing: ligatures resolved, no hyphens at line ends, single spaces, lower case."""
    joined = re.sub(r"(?<=\w)-\s*\n\s*", "", unicodedata.normalize("NFKC", text))
    return re.sub(r"\s+", " ", joined).lower()


def contract() -> Source:
    rows = json.loads((CONTRACT / "questions.json").read_text("utf-8"))
    cases = [
        Case(row["question"], tuple(row["values"]), page=None if row["unanswerable"] else row["page"]) for row in rows
    ]
    return Source("The example contract", "", CONTRACT / "contract.pdf", cases)


TASN1 = [
    Case("Which version of Libtasn1 is this manual for?", ("4.19.0",), ("version 4.19.0, 18 August 2022",)),
    Case("Under which license are the command line tools licensed?", ("General Public License",),
         ("licensed under the GNU General Public",)),
    Case("Which type does this version not handle?", ("REAL",), ("handle the REAL type",)),
    Case("What is the header file of this library?", ("libtasn1.h",), ("header file of this library is",)),
    Case("Which main type is used in the library to store the ASN.1 definitions?", ("asn1_node", "asn1 node"),
         ("main type used in it is",)),
    Case("To which system should the library be portable?", ("C89",), ("portable to any C89 system",)),
    Case("Which name indicates the last element of a SET OF or SEQUENCE OF?", ("LAST",), ("LAST name indicates",)),
    Case("Which program reads a single file with ASN.1 definitions?", ("asn1Parser",), ("asn1Parser reads a single",)),
    Case("Which program generates a DER encoding?", ("asn1Coding",), ("asn1Coding generates a DER",)),
    Case("To which address are bugs reported?", ("help-libtasn1@gnu.org",), ("Report bugs to: help-libtasn1",)),
    Case("Which file distributed with the library is an example of the syntax?", ("pkix.asn",),
         ("check the pkix.asn file",)),
    Case("Where is no limit in the library?", ("INTEGER", "ENUMERATED"), ("No limits for INTEGER",)),
    Case("With what do the comments begin?", ("--",), ("comments begin with --",)),
    Case("Are C-style comments supported?", ("not supported", "no"), ("comments are not supported",)),
    Case("Which recommendation specifies ASN.1?", ("X.680",), ("as specified by the X.680",)),
    Case("What is the name of the root element denoted by?", ("''", "’’"), ("to denote the root element",)),
]  # fmt: skip

CRC = [
    Case("Who proposed Cyclic Redundancy Checks?", ("Peterson",), ("proposed by Peterson and Brown",)),
    Case("When were Cyclic Redundancy Checks proposed?", ("1961",), ("in 1961",)),
    Case("Who published the classic byte-by-byte CRC algorithm?", ("Sarwate",), ("published by Sarwate",)),
    Case("When was the classic byte-by-byte CRC algorithm published?", ("1988",), ("published by Sarwate",)),
    Case("Who published a method that reads data by words in 1993?", ("Black",), ("In 1993, Black",)),
    Case("Who briefly outlined a specialized variant of a CRC in 2001?", ("Braun", "Waldvogel"),
         ("In 2001, Braun and Waldvogel",)),
    Case("Who provided a detailed description and analysis in 2002?", ("Ji", "Killian"), ("In 2002, Ji and Killian",)),
    Case("Who demonstrated clear performance benefits of this scheme in software?", ("Kouvanis", "Berry"),
         ("Kouvanis and Berry",)),
    Case("Which CPU was used for the tests?", ("Q9650",), ("Intel Q9650",)),
    Case("Which chipset did the motherboard of the tests have?", ("P45",), ("P45 chipset",)),
    Case("What is the date of the paper?", ("September 3, 2010",), ("September 3, 2010",)),
    Case("For which company does Andrew Kadatch work?", ("Google",), ("Google Inc.",)),
    Case("In which year did Zemtsov implement a method of storing bits after a message?", ("1990",),
         ("was implemented in 1990",)),
    Case("How many CPU cycles per byte does MD5 computation take?", ("6.8",), ("MD5 computation takes",)),
    Case("How many CPU cycles per byte does SHA-1 take?", ("7.6",), ("takes 7.6-7.9",)),
]  # fmt: skip

BZIP2 = [
    Case("How many bits have the CRCs that bzip2 uses as a self-check?", ("32",), ("uses 32-bit CRCs",)),
    Case("From which environment variables does bzip2 read arguments?", ("BZIP",),
         ("environment variables BZIP2 and BZIP",)),
    Case("At how many bits per byte is random data coded?", ("8.05",), ("8.05 bits per byte",)),
    Case("Who XMLised the documentation?", ("Donna Robinson",), ("Donna Robinson",)),
    Case("Who encouraged the author to look for faster sorting algorithms?", ("Christian von Roques",),
         ("Christian von Roques",)),
    Case("Who encouraged the author to improve the worst-case compression performance?", ("Bela Lubkin",),
         ("Bela Lubkin",)),
    Case("What is the default value of workFactor?", ("30",), ("default value of 30",)),
    Case("Which values of workFactor are allowed?", ("0 to 250",), ("from 0 to 250",)),
    Case("How many bits has the pattern that delimits the compressed representation of each block?", ("48",),
         ("48-bit pattern",)),
    Case("How much memory does bunzip2 require for files compressed with the default block size?", ("3700",),
         ("3700 kbytes", "3700k")),
    Case("Who contributed functions for better zlib compatibility?", ("Yoshioka",), ("Yoshioka Tsuneo",)),
    Case("How large compressed files could bzip2recover versions prior to 1.0.2 not handle?", ("512 megabytes",),
         ("512 megabytes",)),
    Case("With what do the names of all externally visible symbols begin?", ("BZ2_",), ("names beginning BZ2",)),
    Case("What is the total size of the files of the Calgary Text Compression Corpus?", ("3,141,622",),
         ("3,141,622",)),
    Case("Of which date is version 1.0.8?", ("13 July 2019",), ("13 July 2019",)),
]  # fmt: skip

DOC = Path("/usr/share/doc")
REAL = [
    Source("GNU Libtasn1, manual", "libtasn1-doc", DOC / "libtasn1-doc/libtasn1.pdf", TASN1),
    Source("Everything we know about CRC", "zlib1g-dev", DOC / "zlib1g-dev/crc-doc.1.0.pdf.gz", CRC),
    Source("bzip2 and libbzip2, manual", "bzip2-doc", DOC / "bzip2/manual.pdf.gz", BZIP2),
]
SOURCES = [contract(), *REAL]
