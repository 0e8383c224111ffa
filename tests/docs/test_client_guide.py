"""What the guide of the Python client shows can be typed, and the index has every page."""

import ast
import re
from pathlib import Path

import pytest

import service.client
from service.client import AsyncClient, Client

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_call_of_the_guide_exists(block):
    tree = compile(block, "client.md", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    client = (AsyncClient if "Async" in block else Client)("http://localhost")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (path := ast.unparse(node.func)).startswith("client."):
            found = client
            for name in path.split(".")[1:]:
                found = getattr(found, name)
            assert callable(found), path


def test_errors_of_the_guide_exist_and_all_are_in_it():
    errors = {
        name
        for name in service.client.__all__
        if isinstance(kind := getattr(service.client, name), type) and issubclass(kind, Exception)
    }
    assert errors - {name for name in errors if f"`{name}`" in GUIDE} == set()


def test_the_index_has_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = {page.name for page in (ROOT / "docs").glob("*.md")} - set(re.findall(r"\]\(([\w-]+\.md)", index))
    assert missing == {"README.md"}, "name every page of docs/ in docs/README.md"
