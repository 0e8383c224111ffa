"""The file of --against is read before the model is loaded, and all of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from service.cli import main

ROW = {"name": "a", "unit": "s", "samples": [1.0]}
RUN = {"format": 1, "at": "2026", "place": {}, "bandwidth_gbps": 1.0, "tflops": 1.0, "rows": [ROW]}


def text(**changed: Any) -> str:
    return json.dumps(RUN | changed)


@pytest.mark.parametrize(
    "content",
    [
        text(rows=[ROW | {"samples": []}]),
        text(rows=[ROW | {"samples": [-1.0]}]),
        text(rows=[ROW | {"samples": [float("nan")]}]),
        text(rows=[ROW | {"samples": ["1"]}]),
        text(rows=[{"name": "a"}]),
        text(place=[]),
        text().replace("[1.0]", "[1e999]"),
        json.dumps({"format": 2, "rows": "of another form"}),
        "{}", "", "no JSON", "[" * 100_000, '{"format": 1, "deep": ' + "[" * 100_000, "\udcff",
    ],
)  # fmt: skip
def test_what_is_no_run_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("PREREAD_ENGINE", "fake")
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    file = tmp_path / "before.json"
    file.write_text(content, errors="surrogateescape")
    result = CliRunner().invoke(main, ["bench", "--against", str(file), "--out", str(tmp_path / "new" / "x"), "--json"])
    assert result.exit_code == 1, result.output
    message = json.loads(result.stdout)["error"]["message"]
    assert "is not a file of `preread bench`" in message or "has format 2" in message
    assert "Loading" not in result.stderr
    assert not (tmp_path / "new").exists()
