"""These tests also run where only the engine is installed: `pytest --confcutdir=tests/gpu tests/gpu`."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """As everywhere in the tests, without the service's settings when `PREREAD_TEST_MODEL` says where it is."""
    named = os.environ.get("PREREAD_TEST_MODEL")
    if named is None:
        from service.settings import Settings

        named = Settings().model_dir
    directory = Path(named)
    if not (directory / "preread.json").is_file():
        pytest.fail(f"{directory} is not an imported model: run `make model`, or deselect with -m 'not model'")
    return directory


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA card"))
