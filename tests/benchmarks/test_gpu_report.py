"""Results from a card become sections of the page; the driver keeps going when a part fails."""

import argparse
import json
from dataclasses import asdict

import pytest

from benchmarks import gpu_all
from benchmarks.gpu_lib import Result, Row, percentile
from benchmarks.gpu_report import read_results, write_page
from benchmarks.gpu_stock import integrated_s


def write(directory, part: str, rows: list[Row], **more) -> None:
    directory.mkdir(exist_ok=True)
    found = {"part": part, "script": "s.py", "dry": False, "machine": "a card", "notes": [], "raw": {}}
    (directory / f"{part}.json").write_text(json.dumps(found | {"rows": [asdict(row) for row in rows]} | more))


def test_later_rows_replace_earlier_ones_in_place(tmp_path):
    write(tmp_path / "one", "decode", [Row("a", "1"), Row("b", "2")], notes=["n"], raw={"x": 1})
    write(tmp_path / "two", "decode", [Row("b", "3", met=True), Row("c", "4")], notes=["n", "m"], raw={"y": 2})
    merged = read_results([tmp_path / "one", tmp_path / "two"])["decode"]
    assert [(row["what"], row["figure"]) for row in merged["rows"]] == [("a", "1"), ("b", "3"), ("c", "4")]
    assert merged["notes"] == ["n", "m"]
    assert merged["raw"] == {"x": 1, "y": 2}


def test_the_page_has_each_part_once_in_order_and_nothing_of_dry_runs(tmp_path):
    page = tmp_path / "page.md"
    write(tmp_path / "r", "parity", [Row("kl", "1e-5", target="under 2e-3", met=True)])
    write(tmp_path / "r", "decode", [Row("speed | x", "10 tok/s", met=False)])
    write(tmp_path / "r", "service", [Row("gap", "1 ms")], dry=True)
    assert write_page([tmp_path / "r"], page) == ["decode", "parity"]
    assert write_page([tmp_path / "r"], page) == ["decode", "parity"]
    text = page.read_text()
    assert text.count("## On a GPU") == 1
    assert text.count("### Decode") == text.count("### Parity") == 1
    assert text.index("### Decode") < text.index("### Parity")
    assert "speed \\| x" in text
    assert "**no**" in text
    assert "gap" not in text


def test_a_failure_of_an_earlier_run_is_told_and_left_out(tmp_path, capsys):
    write(tmp_path / "one", "decode", [Row("a", "failed: OSError: no", met=False), Row("b", "2")])
    write(tmp_path / "two", "decode", [Row("c", "3"), Row("d", "failed: OSError: again", met=False)])
    rows = read_results([tmp_path / "one", tmp_path / "two"])["decode"]["rows"]
    assert [row["what"] for row in rows] == ["b", "c", "d"]
    assert "a: failed: OSError: no" in capsys.readouterr().out


def test_other_json_files_are_no_results(tmp_path):
    (tmp_path / "x.json").write_text("[1, 2]")
    assert write_page([tmp_path], tmp_path / "page.md") == []
    assert not (tmp_path / "page.md").exists()


@pytest.fixture
def arguments(tmp_path):
    return argparse.Namespace(out=str(tmp_path), limit_s=60.0, dry=False)


def test_a_result_is_on_disk_after_every_row_and_an_error_is_a_row(tmp_path, arguments, capsys):
    result = Result("part", "s.py", arguments)
    result.add(Row("a", "1", target="at least 1", met=True))

    def fails() -> None:
        raise ValueError("no such thing\nsecond line")

    assert not result.attempt("b", fails)
    assert not result.attempt("c", lambda: None, needs_s=100)
    capsys.readouterr()
    found = json.loads((tmp_path / "part.json").read_text())
    assert [row["met"] for row in found["rows"]] == [True, False]
    assert found["rows"][1]["figure"] == "failed: ValueError: no such thing"
    assert found["notes"][0].startswith("c: not run, 100 s are needed")
    assert gpu_all.outcome("part", tmp_path) == (2, 1, ["b: failed: ValueError: no such thing (target )"])


def test_a_dry_run_misses_no_speed_but_what_must_hold(arguments, capsys):
    arguments.dry = True
    result = Result("part", "s.py", arguments)
    result.add(Row("speed", "1 tok/s", target="55", met=False))
    result.add(Row("right", "no", target="yes", met=False, must=True))
    lines = capsys.readouterr().out.splitlines()
    assert ["MISSED" in line for line in lines] == [False, True]


def test_a_failing_part_does_not_stop_the_others(arguments, monkeypatch):
    monkeypatch.setattr(gpu_all, "PARTS", {"bad": ("benchmarks.no_such_part", 1.0), "slow": ("this", 3.0)})
    how, seconds = gpu_all.run_part("bad", 30, arguments)
    assert how == "exit 1"
    assert seconds < 30


def test_a_hanging_part_is_ended(arguments, monkeypatch, tmp_path):
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_all, "PARTS", {"slow": ("hangs", 1.0)})
    monkeypatch.setattr(gpu_all, "GRACE_S", 0.2)
    how, seconds = gpu_all.run_part("slow", 1, arguments)
    assert how == "timed out"
    assert seconds < 20


def test_parts_share_the_time_in_proportion(monkeypatch):
    monkeypatch.setattr(gpu_all, "PARTS", {"a": ("", 100.0), "b": ("", 50.0), "c": ("", 50.0)})
    assert gpu_all.share("a", ["b", "c"], 200 + gpu_all.GRACE_S) == 100
    assert gpu_all.share("b", ["c"], 60 + gpu_all.GRACE_S) == 30
    assert gpu_all.share("c", [], 1.0) == 1.0


def test_a_prefill_is_added_up_from_its_depths():
    assert integrated_s([(0, 1.0), (100, 1.0)], 100) == 100
    assert integrated_s([(0, 1.0), (100, 3.0)], 100) == 200
    assert integrated_s([(50, 2.0)], 100) == 200


def test_percentiles_are_values_that_came():
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([3.0], 0.99) == 3
