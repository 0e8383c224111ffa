"""Real Chromium against a real socket: `make browser`. `--screenshots FOLDER` writes the pictures of the docs."""

import shutil
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from tests.browser.world import CONTRACT, Visitor, serving

KEPT = ("web-answer", "web-reading", "web-pdf", "web-chinese", "web-conversation-dark-phone")
"""Pictures that the docs show."""
expect.set_options(timeout=30_000)  # machines that test are busy


def pytest_addoption(parser):
    parser.addoption("--screenshots", default=None, help="Folder to which the pictures of the docs are written.")
    parser.addoption("--all-screenshots", action="store_true", help="All pictures, not only those of the docs.")


@pytest.fixture(scope="session")
def browser():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "There is no Chromium: scripts/browser.sh installs it."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("world") / "data") as world:
        yield world


@pytest.fixture(scope="module")
def contract(world):
    """Id of the example contract, of Ann, read."""
    return world.document("ann", CONTRACT.read_bytes(), "contract.pdf", title="Operation and Maintenance Agreement")


@pytest.fixture
def visit(world, browser):
    """Makes visitors, and looks at the end whether the browser complained, for example about the policy."""
    visitors = []

    def make(**options):
        visitors.append(Visitor(world, browser, **options))
        return visitors[-1]

    yield make
    for visitor in visitors:
        visitor.context.close()
    assert [visitor.complaints for visitor in visitors if visitor.complaints] == []


@pytest.fixture
def picture(request):
    """Writes a small PNG of a page, when pictures are wanted."""
    folder, wants_all = (request.config.getoption(name) for name in ("--screenshots", "--all-screenshots"))

    def take(page, name, **options):
        if folder and (wants_all or name in KEPT):
            path = Path(folder) / f"{name}.png"
            page.screenshot(path=path, animations="disabled", **options)
            with Image.open(path) as shot:
                shot.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)

    return take
