"""`preread worker`."""

import asyncio

import click

from service.cli.output import expected_errors


@click.command()
@expected_errors
def worker() -> None:
    """Run one engine for all API processes that share the Redis of PREREAD_FLEET_URL, until SIGTERM or Ctrl-C."""
    from service.cli.config import read_settings
    from service.core.worker import run_worker
    from service.logs import configure_logging

    settings = read_settings()
    configure_logging(settings)
    asyncio.run(run_worker(settings))
