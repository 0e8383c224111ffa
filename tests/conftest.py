import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The imported demo model: `PREREAD_MODEL`, else `models/demo`."""
    directory = Path(os.environ.get("PREREAD_MODEL") or Path(__file__).parents[1] / "models" / "demo")
    if not (directory / "preread.json").is_file():
        pytest.fail(f"{directory} is not an imported model: run `make model`, or deselect with -m 'not model'")
    return directory
