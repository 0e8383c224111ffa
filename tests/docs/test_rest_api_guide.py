"""The REST guide, with the page of OpenAI's calls, names every endpoint of the application and no other."""

import re
from pathlib import Path

from service.api.routes import CONTROLLERS

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "rest-api.md").read_text(encoding="utf-8")
OPENAI = (DOCS / "openai.md").read_text(encoding="utf-8")


def normal(path: str) -> str:
    """`/v1/documents/{document_id:str}` and `/v1/documents/{id}` are the same path."""
    return re.sub(r"\{[^}]*\}", "{}", path.rstrip("/"))


def served() -> set[tuple[str, str]]:
    found = set()
    for controller in CONTROLLERS:
        for handler in vars(controller).values():
            for method in getattr(handler, "http_methods", ()):
                for path in handler.paths or {""}:
                    whole = f"{controller.path}/{path}" if path.strip("/") else controller.path
                    found.add((str(method), normal(re.sub("/+", "/", f"/{whole}"))))
    return {(method, path) for method, path in found if method not in {"HEAD", "OPTIONS"}}


def documented() -> set[tuple[str, str]]:
    headings = "\n".join(re.findall(r"^### (.+)$", GUIDE, re.MULTILINE))
    calls = "\n".join(re.findall(r"^\| (`[A-Z]+ /.+?) \|", OPENAI, re.MULTILINE))
    found = {(method, normal(path)) for method, path in re.findall(r"`([A-Z]+) (/[^`]+)`", headings + calls)}
    return found | {("GET", path) for path in re.findall(r"^curl \$P(/(?:health/\w+|metrics))", GUIDE, re.MULTILINE)}


def test_the_guide_names_every_endpoint_and_no_other():
    assert documented() == served()
