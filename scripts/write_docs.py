"""Writes the pages that are made from the code: `make docs`. With --check it only says which are not current."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from reference.bench import bench_page  # noqa: E402
from reference.rest import rest_page  # noqa: E402
from reference.settings import env_example, settings_page  # noqa: E402

PAGES = {
    "docs/bench.md": bench_page,
    "docs/rest-reference.md": rest_page,
    "docs/settings.md": settings_page,
    ".env.example": env_example,
}


def stale() -> dict[Path, str]:
    """Files that are not as the code would have them, with what they should be."""
    made = {ROOT / name: make() for name, make in PAGES.items()}
    return {path: text for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text}


def main() -> int:
    found = stale()
    for path, text in found.items():
        print(f"{path.relative_to(ROOT)} is {'not current: run `make docs`' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    return int("--check" in sys.argv and bool(found))


if __name__ == "__main__":
    sys.exit(main())
