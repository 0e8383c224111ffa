"""Logs: JSON lines or a console, with the request's id, never with text of a document, question or answer."""

import logging
import sys

import structlog
from structlog.types import EventDict, Processor

from service.errors import Unavailable
from service.settings import Settings

_CAUSE_LENGTH = 200

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
        return [_in_a_sentence, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # The pretty traceback of the console would print local variables: texts among them.
    return [_in_a_sentence, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]


def _in_a_sentence(_logger: object, _method: str, event: EventDict) -> EventDict:
    """What a database or an engine that is away does to every task in the background, time and again, is said without
    tracebacks: where it was noticed says nothing."""
    error = event.get("exc_info")
    if isinstance(error, Unavailable):
        del event["exc_info"]
        event.update(error=type(error).__name__, detail=error.detail, **_cause(error))
    return event


def _cause(error: Exception) -> dict[str, str]:
    cause = error.__cause__
    return {} if cause is None else {"cause": f"{type(cause).__name__}: {cause}".splitlines()[0][:_CAUSE_LENGTH]}
