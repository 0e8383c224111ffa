"""Whose directory of snapshots goes, and whose stays."""

from pathlib import Path

from service.bench.directory import own_directory


def test_left_overs_go_and_those_of_running_benches_stay(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (target / "kept").mkdir(parents=True)
    (tmp_path / ".bench-link").symlink_to(target)
    (tmp_path / ".bench-killed" / "documents").mkdir(parents=True)
    told: list[str] = []
    with own_directory(tmp_path, told.append) as first:
        assert not (tmp_path / ".bench-killed").exists()
        with own_directory(tmp_path, told.append) as second:
            assert first.is_dir()
            assert second != first
        assert first.is_dir()
        assert not second.exists()
    assert not first.exists()
    assert (target / "kept").is_dir()
    assert not told
