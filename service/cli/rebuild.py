"""`preread snapshots rebuild`."""

import asyncio
from dataclasses import asdict

import click

from service.cli.output import err, expected_errors, json_option, print_json
from service.words import counted


@click.command()
@click.option("--dry-run", is_flag=True, help="Say how much there is to read again, and change nothing.")
@json_option
@expected_errors
def rebuild(dry_run: bool, as_json: bool) -> None:
    """Have documents read again whose snapshot another model, template or KV type has made.

    The server does it in the background, now or when it is started next: those that were asked about last first. One
    that is asked about before its turn is read at once.
    """
    from service.cli.config import read_settings
    from service.core.rebuilding import plan_rebuild

    plan = asyncio.run(plan_rebuild(read_settings(), dry_run=dry_run))
    if as_json:
        print_json(
            {
                "dry_run": dry_run, "tokens": plan.n_tokens, "tokens_per_s": plan.tokens_per_s, "hours": plan.hours,
                "documents": [asdict(document) for document in plan.documents], "marked": plan.n_marked,
            }
        )  # fmt: skip
        return
    for document in plan.documents:
        click.echo(f'{document.id} "{document.title}": {counted(document.n_tokens, "token")}')
    summary = f"{counted(len(plan.documents), 'document')}, {counted(plan.n_tokens, 'token')}"
    if plan.hours is None:
        err.print(f"{summary}; how long that takes is not known before a document was read", style="dim")
    else:
        err.print(f"{summary}: {_time_text(plan.hours)} at {plan.tokens_per_s:,.0f} tokens/s", style="dim")
    if plan.n_marked:
        err.print("The server reads them again in the background, now or when it is started next.", style="dim")


def _time_text(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
