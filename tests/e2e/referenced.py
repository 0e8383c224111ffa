"""Results of `reference.py`."""

import json
import subprocess
import sys
from typing import Any

from tests.e2e.server import ROOT


def reference(what: str, **arguments: Any) -> Any:
    """The result of a part of `reference.py`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.reference", what],
        cwd=ROOT,
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
