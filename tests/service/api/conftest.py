import pytest

from tests.service.live import live_server


@pytest.fixture
def serve(settings):
    """Starts a server with a fake engine; it is stopped at the end of the block."""

    def started(engine=None, **changes):
        return live_server(settings.model_copy(update=changes), engine)

    return started
