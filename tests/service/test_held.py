"""Directories of processes that live stay; those of killed ones go."""

import os
from pathlib import Path

from service.held import held_directory


def test_what_nobody_holds_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".work-killed", ".other-killed", "work"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / ".work-file").write_text("a file")
    (tmp_path / ".work-link").symlink_to(tmp_path / "work")
    first, lock = held_directory(tmp_path, ".work-")
    second, other = held_directory(tmp_path, ".work-")
    assert first.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {
        first.name, second.name, ".other-killed", "work", ".work-file", ".work-link"
    }  # fmt: skip
    os.close(lock)
    _, third = held_directory(tmp_path, ".work-")
    assert not first.exists()
    assert second.is_dir()
    os.close(other)
    os.close(third)
