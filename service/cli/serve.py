"""`preread serve`."""

import click

from service.cli.output import expected_errors
from service.collector import starting


@click.command()
@click.option("--host", help="Address to listen on (PREREAD_HOST).")
@click.option("--port", type=click.IntRange(0, 65535), help="Port, 0 for a free one (PREREAD_PORT).")
@click.option("--allow-remote", is_flag=True, help="Listen where others can reach it (PREREAD_ALLOW_REMOTE).")
@expected_errors
def serve(host: str | None, port: int | None, allow_remote: bool) -> None:
    """Serve the REST API until SIGTERM or Ctrl-C."""
    with starting():
        from service.cli.config import read_settings
        from service.cli.local import check_start
        from service.serve import run

    settings = read_settings(host=host, port=port, allow_remote=allow_remote or None)
    check_start(settings)
    raise SystemExit(run(settings))
