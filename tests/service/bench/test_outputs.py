"""Files of a run: tried before, written in one piece, and nothing left of those that were not."""

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.bench.outputs import Output, same_file
from service.cli import main
from service.errors import Invalid

SMALL = ("--contexts", "300", "--users", "1", "--repeats", "1", "--answer-tokens", "8")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PREREAD_ENGINE", "fake")
    monkeypatch.setenv("PREREAD_FREE_FLOOR_BYTES", "0")


@pytest.mark.parametrize("path", ["/proc/x.json", "/dev/null/x/y.json", "/dev/null", f"/tmp/{'x' * 300}"])
def test_what_cannot_be_written_is_said_before(path: str) -> None:
    with pytest.raises(Invalid, match="cannot be written"), Output(Path(path)):
        pass


def test_folders_made_for_a_file_that_is_not_written_go_again(tmp_path: Path) -> None:
    with Output(tmp_path / "new" / "deep" / "x.json"):
        assert (tmp_path / "new" / "deep").is_dir()
    assert list(tmp_path.iterdir()) == []
    with Output(tmp_path / "new" / "x.json") as output:
        output.write(b"x")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.json"]


def test_an_earlier_file_stays_until_all_of_the_next_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_bytes(b"before")
    real.chmod(0o640)
    link.symlink_to(real)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, Output(link) as output:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            output.write(b"after")
    assert real.read_bytes() == b"before"
    with Output(link) as output:
        output.write(b"after")
    assert (link.is_symlink(), real.read_bytes(), real.stat().st_mode & 0o777) == (True, b"after", 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_names_of_one_file_are_found(tmp_path: Path) -> None:
    one, link = tmp_path / "s.json", tmp_path / "link.json"
    link.symlink_to(one)
    assert same_file(one, link)
    assert same_file(one, tmp_path / "." / "s.json")
    assert not same_file(one, tmp_path / "other.json")
    one.touch()
    os.link(one, tmp_path / "hard.json")
    assert same_file(one, tmp_path / "hard.json")


@pytest.mark.usefixtures("settings")
def test_a_plot_has_a_name_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text("{}")
    for option in ("--out", "--against"):
        result = CliRunner().invoke(main, ["bench", option, str(file), "--svg", f"{tmp_path}/./s.json"])
        assert result.exit_code == 2, result.output
        assert f"{option} and --svg name the same file" in result.output
    assert file.read_text() == "{}"


@pytest.mark.usefixtures("settings")
def test_figures_are_printed_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Output, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Output, "write", full)
    result = CliRunner().invoke(main, ["bench", *SMALL, "--out", str(tmp_path / "new" / "x.json")])
    assert result.exit_code == 1, result.output
    assert "x.json could not be written: No space left on device" in result.output
    assert "| prefill, 300 tokens |" in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "options", [["--users", "99999999"], ["--repeats", "9" * 400], ["--answer-tokens", "9" * 400], ["--minutes", "0"]]
)
def test_numbers_that_mean_nothing_are_refused(options: list[str]) -> None:
    result = CliRunner().invoke(main, ["bench", *options])
    assert result.exit_code == 2, result.output
    assert "Loading" not in result.output
