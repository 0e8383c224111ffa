"""Fails when a file has more than 400 lines or a function more than 60: `make check` runs it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60


def tracked_files() -> list[Path]:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for name in names if (path := Path(name)).exists()]


def excesses(path: Path) -> Iterator[str]:
    """One sentence for each thing in a file that is too long."""
    source = path.read_text()
    n_lines = source.count("\n")
    if n_lines > FILE_LINES:
        yield f"{path}: {n_lines} lines, at most {FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main() -> int:
    found = [line for path in tracked_files() for line in excesses(path)]
    print("\n".join(found) or "sizes are within the budget")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
