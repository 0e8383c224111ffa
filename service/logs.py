"""Logs: JSON lines or a console, with the request's id, never with text of a document, question or answer."""

import logging
import sys

import structlog
from structlog.types import Processor

from service.settings import Settings

_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def configure_logging(settings: Settings) -> None:
    """Send structlog and the standard library's loggers to standard error in one format."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(settings)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for chatty in ("sqlalchemy", "aiosqlite", "alembic", "httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Requests are logged by `service.api.observe`, with their route instead of their path.
    logging.getLogger("uvicorn.access").disabled = True


def _renderers(settings: Settings) -> list[Processor]:
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    if as_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # The pretty traceback of the console would print local variables: texts among them.
    return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
