"""Figures over all documents: one line per method and ratio."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.fidelity_parts.facts import STRINGS
from benchmarks.fidelity_parts.measure import LEAST_GAIN, recovery
from benchmarks.fidelity_parts.methods import Measured

GROUPS = {
    "prose": ("prose",),
    "strings": STRINGS,
    "code": ("code",),
    "uuid": ("uuid",),
    "cell": ("cell",),
    "aggregate": ("aggregate",),
}


class Group(msgspec.Struct):
    """Questions of one sort. `spread`: standard error of the recovery over documents."""

    n: int
    recovery: float
    spread: float
    nll: float
    mean_kl: float


class Line(msgspec.Struct):
    """A method at a ratio, over all documents. `rows` and `fetched` are means per head and question; `found`: share of
    questions whose fact was resident or fetched, whole."""

    method: str
    ratio: int
    n_documents: int
    rows: float
    fetched: float
    found: float | None
    mean_kl: float
    p99_kl: float
    same: float
    groups: dict[str, Group]
    notes: dict[str, float]


class Report(msgspec.Struct):
    """What a run writes. `full` and `none`: mean NLL (nats per value) with the full cache and without a document."""

    model: str
    machine: str
    seconds: float
    seed: int
    document_tokens: list[int]
    documents: list[str]
    n_questions: int
    full: dict[str, float]
    none: dict[str, float]
    lines: list[Line]

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "Report":
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Collected:
    """Outcomes of documents as they come in."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], dict[int, Measured]] = defaultdict(dict)
        self._kinds: list[list[str]] = []

    def begin(self, kinds: list[str]) -> None:
        """The next document, with the kinds of its questions."""
        self._kinds.append(kinds)

    def add(self, measured: Measured) -> None:
        self._found[measured.method, measured.ratio][len(self._kinds) - 1] = measured

    def lines(self) -> list[Line]:
        return [self._line(*key, of_document) for key, of_document in self._found.items()]

    def mean_nll(self, method: str) -> dict[str, float]:
        return {
            name: group.nll for line in self.lines() if line.method == method for name, group in line.groups.items()
        }

    def _line(self, method: str, ratio: int, of_document: dict[int, Measured]) -> Line:
        found = list(of_document.values())
        outcomes = [o for m in found for o in m.outcomes]
        kl = torch.tensor([k for o in outcomes for k in o.kl], dtype=torch.float64)
        same = [s for o in outcomes for s in o.same]
        facts = [f for m in found for f in m.found or [] if f is not None]
        notes = defaultdict(list)
        for m in found:
            for name, value in (m.notes or {}).items():
                notes[name].append(value)
        return Line(
            method,
            ratio,
            len(found),
            _mean([m.rows for m in found]),
            _mean([m.fetched for m in found]),
            _mean(facts) if facts else None,
            float(kl.mean()),
            float(kl.quantile(0.99)),
            _mean(same),
            {name: g for name, kinds in GROUPS.items() if (g := self._group(of_document, kinds)) is not None},
            {name: _mean(values) for name, values in notes.items()},
        )

    def _group(self, of_document: dict[int, Measured], kinds: Sequence[str]) -> Group | None:
        triples: list[tuple[float, float, float]] = []
        single, kl, nll = [], [], []
        for i, measured in of_document.items():
            full, none = (self._found[name, 1][i].outcomes for name in ("full", "no document"))
            mine = [
                (n.nll, o.nll, f.nll, o.kl)
                for kind, n, o, f in zip(self._kinds[i], none, measured.outcomes, full, strict=True)
                if kind in kinds
            ]
            nll += [o for _, o, _, _ in mine]
            kl += [k for *_, of_rows in mine for k in of_rows]
            counted = [(n, o, f) for n, o, f, _ in mine if n - f >= LEAST_GAIN]
            triples += counted
            if counted:
                single.append(_recovery(counted))
        if not triples:
            return None
        spread = float(torch.tensor(single).std() / len(single) ** 0.5) if len(single) > 1 else 0.0
        return Group(len(triples), _recovery(triples), spread, _mean(nll), _mean(kl))


def _recovery(triples: Sequence[tuple[float, float, float]]) -> float:
    return recovery(*(sum(part) for part in zip(*triples, strict=True)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
