"""`preread doctor`."""

from pathlib import Path
from typing import Any

import click

from service.cli.output import EXIT_FAILURE, expected_errors, json_option, print_json

_MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skip": "-"}


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="A model directory, imported or not.")
@click.option("--check", "only", multiple=True, help="Only this check; may be given several times.")
@json_option
@expected_errors
def doctor(model: Path | None, only: tuple[str, ...], as_json: bool) -> None:
    """Look for what makes this installation slow, or stops it: each check with what was seen and what to do.

    Exit code 0: no check failed (warnings may be meant so); 1: one did.
    """
    from service.cli.config import read_settings
    from service.doctor.examine import examine
    from service.doctor.probes import SystemProbes

    found = examine(read_settings(), SystemProbes(), model_dir=model, only=only)
    if as_json:
        print_json(found)
    else:
        _print(found)
    if not found.healthy:
        raise SystemExit(EXIT_FAILURE)


def _print(found: Any) -> None:
    width = max((len(finding.check) for finding in found.findings), default=0)
    for finding in found.findings:
        click.echo(f"{_MARKS[finding.status]:<4} {finding.check:<{width}}  {finding.evidence}")
        if finding.remedy:
            click.echo(f"     {'':<{width}}  -> {finding.remedy}")
