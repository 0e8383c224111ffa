"""What `make llamacpp` made: llama.cpp, and the demo model as a GGUF with its adapter."""

import os
from pathlib import Path
from typing import Any

import pytest

from service.settings import Settings
from tests.e2e.conftest import pytest_runtest_makereport, serve, serve_all  # noqa: F401 - fixtures and a hook

MIB = 1 << 20


@pytest.fixture(scope="session")
def gguf_model() -> Path:
    """`PREREAD_TEST_GGUF_MODEL`, else where `make llamacpp` puts it."""
    directory = Path(os.environ.get("PREREAD_TEST_GGUF_MODEL") or Settings().models_dir / "demo-gguf")
    if not (directory / "model.gguf").is_file():
        pytest.fail(f"{directory} has no GGUF: run `make llamacpp`")
    return directory


@pytest.fixture(scope="session")
def demo_model(gguf_model: Path) -> Path:
    """In place of the torch engine's, for the tests that are the same ones."""
    return gguf_model


@pytest.fixture(scope="session")
def of_llama(gguf_model: Path) -> dict[str, Any]:
    """Settings of a server."""
    return {"engine": "llamacpp", "model": gguf_model, "resident_bytes": 300 * MIB, "threads": _threads()}


def _threads() -> int:
    """llama.cpp's threads spin while they wait for each other: more than there are cores for stand still."""
    return int(os.environ.get("OMP_NUM_THREADS") or 2)
