"""What is there when the calls are tried: documents in several states, sessions with answers, shares."""

import json
from dataclasses import dataclass, field

from tests.e2e.server import Server

N_DOCUMENTS = 12
_TEXT = "Report {n}. The safety officer is Bartholomew Kemp. The connection fee is 1,275 pounds.\n\n"


@dataclass
class Visited:
    """Ids by the name of the parameter that takes them."""

    ids: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, id: str) -> None:
        self.ids.setdefault(name, []).append(id)

    def dictionaries(self) -> str:
        """For the configuration of schemathesis: most addresses get an id that is there."""
        lines = [f"[dictionaries.{name}]\nvalues = {json.dumps(ids)}\n" for name, ids in self.ids.items()]
        lines.append("[parameters]\n")
        lines += [f'"path.{name}" = {{ dictionary = "{name}", probability = 0.8 }}\n' for name in self.ids]
        return "".join(lines)


def visit(server: Server) -> Visited:
    """Uploads, asks and shares. Documents whose text is none end as failed."""
    visited = Visited()
    for n in range(N_DOCUMENTS):
        text = (_TEXT.format(n=n) * (n + 1)).encode()
        visited.add("document_id", server.ready(text, f"{n}.txt")["id"])
    for document_id in visited.ids["document_id"]:
        session_id = server.session(document_id)
        visited.add("session_id", session_id)
        visited.add("answer_id", server.ask(session_id)["id"])
        shared = server.request("POST", f"/v1/documents/{document_id}/shares", json={"with": "link"})
        visited.add("share_id", shared.json()["id"])
    visited.add("document_id", server.until_ended(server.upload(b"%PDF-1.4 nothing")["id"])["id"])
    return visited
