"""What a check found."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail", "skip"]


class Finding(msgspec.Struct, frozen=True):
    """`evidence`: what was seen, with the figures. `remedy`: what to do, "" where nothing is wrong.

    `fail`: wrong, or far slower than it could be. `warn`: may be meant so. `skip`: does not apply here, or could not be
    looked at; the evidence says which.
    """

    check: str
    status: Status
    evidence: str
    remedy: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """All findings, worst first. `healthy`: no check failed."""

    healthy: bool
    findings: list[Finding]


def diagnosis(findings: list[Finding]) -> Diagnosis:
    """Findings in order of how bad they are."""
    return Diagnosis(all(finding.status != "fail" for finding in findings), _worst_first(findings))


def together(findings: Sequence[Finding]) -> Finding:
    """Several findings of one check as one: as bad as the worst of them, with the words of all."""
    ordered = _worst_first(findings)
    evidence = "; ".join(finding.evidence for finding in ordered)
    remedies = dict.fromkeys(finding.remedy for finding in ordered if finding.remedy)
    return Finding(ordered[0].check, ordered[0].status, evidence, "; ".join(remedies))


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    order = ("fail", "warn", "ok", "skip")
    return sorted(findings, key=lambda finding: order.index(finding.status))
