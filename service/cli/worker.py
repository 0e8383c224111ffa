"""`preread worker`."""

import asyncio

import click

from service.cli.output import expected_errors
from service.collector import starting


@click.command()
@click.option("--check", is_flag=True, help="Say whether the worker of this data directory takes requests, and end.")
@expected_errors
def worker(check: bool) -> None:
    """Run one engine for all API processes that share the Redis of PREREAD_FLEET_URL, until SIGTERM or Ctrl-C.

    With --check the exit code is 0 when that engine runs, is registered and answers: for health checks.
    """
    from service.cli.config import read_settings

    settings = read_settings()
    if check:
        from service.core.worker_check import check_worker

        click.echo(asyncio.run(check_worker(settings)))
        return
    with starting():
        from service.core.worker import run_worker
        from service.logs import configure_logging

    configure_logging(settings)
    asyncio.run(run_worker(settings))
