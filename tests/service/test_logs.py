import json

import pytest
import structlog

from service.errors import DatabaseUnavailable, StorageFull
from service.logs import configure_logging


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as seen:
        return seen


@pytest.fixture
def told(settings, capsys):
    def tell(log_format, error):
        configure_logging(settings.model_copy(update={"log_format": log_format}))
        structlog.stdlib.get_logger("test").error("rows were not watched", exc_info=error)
        return capsys.readouterr().err

    return tell


def test_a_database_that_is_away_is_one_line(told):
    cause = ConnectionRefusedError(111, "Connection refused\nand more")
    error = raised(DatabaseUnavailable("The database does not answer.", retry_after_s=2), cause)
    line = json.loads(told("json", error))
    assert (line["event"], line["error"]) == ("rows were not watched", "DatabaseUnavailable")
    assert line["detail"] == "The database does not answer."
    assert line["cause"] == "ConnectionRefusedError: [Errno 111] Connection refused"
    assert "exception" not in line
    assert "Traceback" not in told("console", error)


def test_what_nobody_foresaw_keeps_its_traceback(told):
    for log_format in ("json", "console"):
        assert "Traceback" in told(log_format, raised(RuntimeError("a fault")))
        assert "Traceback" in told(log_format, raised(StorageFull("a fault of ours")))
