import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner, Result

from service.bench.measure import Bench, Work
from service.bench.physics import Physics
from service.bench.report import changes_text
from service.bench.results import Row, Run, compare, differences, load_run, run_bytes
from service.bench.roofline import points, roofline
from service.cli import main
from service.engine.factory import EngineConfig
from service.engine.local import LocalEngine
from service.engine.protocol import EngineLost
from service.errors import Invalid

PHYSICS = Physics(
    bandwidth_gbps=10.0, tflops=0.1, step_nbytes=10_000_000, row_nbytes=1000, stored_row_nbytes=500, token_flops=2e7,
    row_flops=1e4, vocab_size=240,
)  # fmt: skip
WORK = Work(contexts=(300,), users=(1, 2), repeats=2, answer_tokens=12)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def measured(store: Path, work: Work = WORK, **more: Any) -> Bench:
    script = list(b"one two three four five six seven")
    engine = await LocalEngine.open(EngineConfig(store_dir=str(store), engine="fake", fake_script=script, **more))
    try:
        bench = Bench(engine, store, PHYSICS, work)
        await bench.run()
        return bench
    finally:
        await engine.close()


def run_of(rows: list[Row], **place: str) -> Run:
    return Run(1, "2026-01-02T03:04:05+00:00", {"device": "X", "model": "m"} | place, 10.0, 0.1, rows)


@pytest.mark.anyio
async def test_an_engine_of_known_pace_is_measured_as_that(tmp_path: Path) -> None:
    rows = {row.name: row for row in (await measured(tmp_path, fake_step_s=0.02)).rows}
    assert set(rows) == {
        "prefill, 300 tokens", "first token, cold, 300 tokens", "decode, 300 tokens, 1 users, one document",
        "decode, 300 tokens, 2 users, one document", "decode, 300 tokens, 2 users, 2 documents",
        "first token, host, 300 tokens", "first token, disk, 300 tokens", "restore, disk, 300 tokens",
    }  # fmt: skip
    one = rows["decode, 300 tokens, 1 users, one document"]
    assert 10 < max(one.samples) <= 51  # a step takes 20 ms and more on a busy machine
    assert one.bound == pytest.approx(10e9 / (10_000_000 + 300 * 1000))
    assert one.gbps == pytest.approx(one.value * (10_000_000 + 300 * 1000) / 1e9)
    assert one.share == pytest.approx(one.value / one.bound)
    assert max(rows["decode, 300 tokens, 2 users, one document"].samples) > one.value
    apart = rows["decode, 300 tokens, 2 users, 2 documents"]
    assert apart.nbytes - one.nbytes == 300 * 1000
    assert all(len(row.samples) == 2 for row in rows.values())
    assert not rows["first token, disk, 300 tokens"].higher_is_better


@pytest.mark.anyio
async def test_what_the_engine_refuses_is_said(tmp_path: Path) -> None:
    engine = await LocalEngine.open(EngineConfig(store_dir=str(tmp_path), engine="fake", max_context=256))
    try:
        with pytest.raises(EngineLost, match="a question was not answered: the question has 24 tokens"):
            await Bench(engine, tmp_path, None, WORK).run()
    finally:
        await engine.close()


@pytest.mark.anyio
async def test_answers_that_end_at_once_are_no_figure(tmp_path: Path) -> None:
    config = EngineConfig(store_dir=str(tmp_path), engine="fake", fake_script=[*b"no", 256])
    engine = await LocalEngine.open(config)
    try:
        bench = Bench(engine, tmp_path, None, WORK)
        await bench.run()
    finally:
        await engine.close()
    assert not any(row.name.startswith("decode") for row in bench.rows)
    assert {row.name for row in bench.rows} >= {"prefill, 300 tokens", "first token, disk, 300 tokens"}
    assert all("ends its answers before 12 tokens" in part.why for part in bench.left_out)
    assert len(bench.left_out) == 3


def test_two_runs_are_compared_row_by_row() -> None:
    before = run_of([Row("a", "tok/s", [10.0, 20.0, 30.0]), Row("b", "s", [2.0], False), Row("gone", "s", [1.0])])
    now = run_of([Row("a", "tok/s", [30.0]), Row("b", "s", [4.0], False), Row("new", "s", [1.0])], torch="2")
    changes = compare(before, now)
    assert [(c.name, c.before, c.now, c.better_by) for c in changes] == [
        ("a", 20, 30, 0.5), ("b", 2, 4, -0.5), ("gone", 1, None, None),
    ]  # fmt: skip
    assert [c.worse_than(0.2) for c in changes] == [False, True, False]
    assert changes_text(changes, []).endswith("| b | 2 s | 4 s | -50.0% |\n| gone | 1 s | not measured |  |")
    assert differences(before, now) == ["torch: nothing before, 2 now"]


def test_a_run_is_kept_in_a_file(tmp_path: Path) -> None:
    run = run_of([Row("a", "tok/s", [1.0, 2.0], bound=4.0)])
    (tmp_path / "run.json").write_bytes(run_bytes(run))
    assert load_run(tmp_path / "run.json") == run
    assert run.rows[0].share == 1.5 / 4
    (tmp_path / "other.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(run, format=2)))
    with pytest.raises(Invalid, match="has format 2"):
        load_run(tmp_path / "other.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(Invalid, match="not a file of `preread bench`"):
        load_run(tmp_path / "bad.json")


def test_the_plot_has_every_point_below_the_roof() -> None:
    decode = Row("decode, 1 < 2", "tok/s", [500.0], nbytes=1e7, gbps=5.0, bound=1000.0, flops=2e7)
    prefill = Row("prefill, 300 tokens", "tok/s", [2000.0], nbytes=1e7, gbps=2000 / 300 / 100, bound=4000.0, flops=6e9)
    run = run_of([decode, prefill, Row("first token", "s", [1.0])])
    assert [(row.name, x) for row, x, _ in points(run)] == [("decode, 1 < 2", 2.0), ("prefill, 300 tokens", 600.0)]
    root = ElementTree.fromstring(roofline(run))
    circles = root.findall(f"{SVG}circle")
    assert [circle.findtext(f"{SVG}title") for circle in circles] == [
        "decode, 1 < 2: 500 tok/s, 50% of the bound", "prefill, 300 tokens: 2e+03 tok/s, 50% of the bound",
    ]  # fmt: skip
    roof = [tuple(map(float, p.split(","))) for p in root.find(f"{SVG}polyline").attrib["points"].split()]  # type: ignore[union-attr]
    top = min(y for _, y in roof)
    for circle in circles:
        assert roof[0][0] < float(circle.attrib["cx"]) < roof[-1][0]
        assert top < float(circle.attrib["cy"]) < roof[0][1]


def preread(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == exit_code, result.output
    assert "Traceback" not in result.output
    return result


def test_the_command_measures_writes_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PREREAD_ENGINE", "fake")
    monkeypatch.setenv("PREREAD_FREE_FLOOR_BYTES", "0")
    small = ("--contexts", "300", "--users", "1", "--repeats", "1", "--answer-tokens", "8")
    first = preread(*small, "--out", str(tmp_path / "a.json"), "--svg", str(tmp_path / "a.svg"))
    assert re.search(r"\| prefill, 300 tokens \| [0-9.e+]+ tok/s", first.output)
    assert not any((tmp_path / "data").glob(".bench-*"))
    ElementTree.parse(tmp_path / "a.svg")
    run = json.loads((tmp_path / "a.json").read_text())
    for row in run["rows"]:
        worse = 1e6 if row["higher_is_better"] else 1e-6
        row["samples"] = [value * worse for value in row["samples"]]
    (tmp_path / "fast.json").write_text(json.dumps(run))
    second = preread(*small, "--against", str(tmp_path / "fast.json"), exit_code=1)
    assert "| better by |" in second.output
    assert "-100.0%" in second.output
    run["rows"] = [{**run["rows"][0], "name": "what failed today"}]
    (tmp_path / "more.json").write_text(json.dumps(run))
    assert re.search(
        r"\| what failed today \| .* \| not measured \|",
        preread(*small, "--against", str(tmp_path / "more.json")).output,
    )
    assert preread("--contexts", "none", exit_code=2).output
