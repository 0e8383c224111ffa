from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ingest.pdf_maker import PdfMaker


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def pdf() -> PdfMaker:
    return PdfMaker()


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    """Write an upload to disk under a name that says nothing."""

    def write(content: bytes) -> Path:
        path = tmp_path / "upload"
        path.write_bytes(content)
        return path

    return write
