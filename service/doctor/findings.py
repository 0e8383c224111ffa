"""What a check found."""

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
    order = ("fail", "warn", "ok", "skip")
    worst_first = sorted(findings, key=lambda finding: order.index(finding.status))
    return Diagnosis(all(finding.status != "fail" for finding in findings), worst_first)
