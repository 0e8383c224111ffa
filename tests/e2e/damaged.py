"""Documents whose snapshots are damaged between a stop and a start, and what must be true of them then."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.damage import Damage
from tests.e2e.server import Server

QUESTION = "Who keeps the lighthouse?"
MAX_TOKENS = 16
KEEPERS = ["Ada Brun", "Tom Quill", "Ida Marsh", "Ben Oakes", "Eve Stroud", "Max Tolley", "Una Wick", "Sam Yarrow"]


@dataclass
class Case:
    """A document, an answer about it before the damage, and one from after it with the document as it is then."""

    server: Server
    document: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    rebuilt: dict[str, Any]


class Damaged:
    """One document for each damage, read and asked about."""

    def __init__(self, server: Server, damages: Sequence[Damage], texts: Sequence[str]) -> None:
        self._server = server
        self._damages = damages
        self._documents = [server.ready(text.encode()) for text in texts]
        self._other = server.ready(texts[-1].replace("lighthouse", "mill").encode())
        self._before = [self._ask(document) for document in self._documents]

    def apply(self) -> None:
        """Damage all of them, while the server is stopped."""
        other = directory_of(self._server, self._other["id"])
        for damage, document in zip(self._damages, self._documents, strict=True):
            damage.apply(directory_of(self._server, document["id"]), other)

    def ask_again(self) -> dict[str, Case]:
        """By the damage's name."""
        cases = {}
        for damage, document, before in zip(self._damages, self._documents, self._before, strict=True):
            after = self._ask(document)
            cases[damage.name] = Case(self._server, document, before, after, self._server.document(document["id"]))
        return cases

    def _ask(self, document: dict[str, Any]) -> dict[str, Any]:
        return self._server.ask(self._server.session(document["id"]), QUESTION, max_tokens=MAX_TOKENS)


def directory_of(server: Server, document_id: str) -> Path:
    (directory,) = (server.store / "snapshots").glob(f"*/documents/{document_id}/*")
    return directory


def story(n: int, n_sentences: int) -> str:
    visits = "".join(f"Visitor {i} climbed {i + n} steps and rested. " for i in range(n_sentences))
    return f"{visits}\n\nThe lighthouse is kept by {KEEPERS[n % len(KEEPERS)]}, who lives below the lamp.\n"


def expect_right_and_tidy(case: Case, damage: Damage) -> None:
    server, tokens = case.server, case.document["token_count"]
    assert case.after["answer"] == case.before["answer"]
    assert (case.after["cache"]["miss_reason"], case.after["cache"]["source"]) == (damage.reason, "none")
    usage = case.after["usage"]
    assert (usage["document_tokens"], usage["reused_tokens"]) == (tokens, 0)
    assert tokens < usage["prefilled_tokens"] < tokens + 40
    assert case.rebuilt["status"] == "ready"
    assert case.rebuilt["snapshot"]["state"] == "ready"
    again = server.ask(server.session(case.document["id"]), QUESTION, max_tokens=MAX_TOKENS)
    assert (again["answer"], again["cache"]["miss_reason"]) == (case.before["answer"], None)
    assert again["usage"]["reused_tokens"] == tokens
    kept = [path.suffix for path in (server.store / "quarantine").iterdir() if case.document["id"] in path.name]
    assert sorted(kept) == ([] if damage.reason == "absent" else ["", ".json"])
