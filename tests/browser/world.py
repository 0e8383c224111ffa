"""A server over the fake engine with keys for people, and browsers that visit it."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from service.core.adapters import Given
from service.core.key_ring import KeyRing
from service.core.prompts import fake_prompts
from service.core.services import Services
from service.engine.fake import FakeEngine
from service.serve import Server, make_server
from service.settings import Settings

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "examples" / "contract" / "contract.pdf"
FEE = "The yearly service charge is 2,340,000 pounds"
# What axe measures: WCAG 2.2 A and AA, and what it calls best practice.
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
}


@dataclass
class World:
    """A running server; `keys` by user."""

    url: str
    engine: FakeEngine
    services: Services
    loop: asyncio.AbstractEventLoop
    keys: dict[str, str] = field(default_factory=dict)

    def key(self, user: str) -> str:
        """Theirs, made when it is wanted first."""
        if user not in self.keys:
            ring = KeyRing(self.services.db, self.services.clock)
            made = ring.create(user=user, organization="acme", scopes=["manage"])
            self.keys[user] = self.run(made)[1]
            self.services.keys.look_again()
        return self.keys[user]

    def run(self, awaitable: Any) -> Any:
        """Something of the server, in its event loop."""
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(30)

    def client(self, user: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, headers={"Authorization": f"Bearer {self.key(user)}"})

    def document(self, user: str, content: bytes, name: str, **fields: str) -> str:
        """Id of a document of theirs that was read."""
        with self.client(user) as client:
            sent = client.post("/v1/documents", files={"file": (name, content)}, data=fields)
            document_id = sent.json()["id"]
            deadline = time.monotonic() + 60
            while client.get(f"/v1/documents/{document_id}").json()["status"] not in ("ready", "failed"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        return document_id


@contextmanager
def serving(data_dir: Path) -> Iterator[World]:
    """Serve until the end of the block."""
    engine = FakeEngine(max_context=200_000)
    settings = Settings(data_dir=data_dir, engine="fake", port=0, free_floor_bytes=0, answer_room_tokens=64)
    server, listening = make_server(settings, Given(engine=engine, prompts=fake_prompts()))
    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=_run, args=(server, listening, loops), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        world = World(url, engine, server.app.state.services, loops[0])
        world.key("ann")  # from the first key on, everybody needs one
        yield world
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


def _run(server: Server, listening: Any, loops: list[asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listening])

    asyncio.run(main())


class Visitor:
    """A browser context of its own. What its pages say on the console as errors is kept: there must be none."""

    def __init__(self, world: World, browser: Browser, **options: Any) -> None:
        self.world = world
        self.context = browser.new_context(base_url=world.url, reduced_motion="reduce", **options)
        self.context.set_default_timeout(30_000)
        self.complaints: list[str] = []
        self.page: Page = self.context.new_page()
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _heard(self, message: Any) -> None:
        # Refusals that a test provokes are shown by the page itself; the browser has a line for each, too.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def sign_in(self, user: str) -> Page:
        """Through the form."""
        self.page.goto("/app/sign-in")
        self.page.get_by_label("API key").fill(self.world.key(user))
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url("**/")
        return self.page

    def give_cookie(self, user: str) -> Page:
        """Signed in without the form."""
        signed_in = self.world.run(self.world.services.web_sessions.sign_in(self.world.key(user)))
        self.context.add_cookies(
            [
                {
                    "name": "preread_session", "value": signed_in.cookie, "url": self.world.url, "httpOnly": True,
                    "sameSite": "Strict",
                }
            ]
        )  # fmt: skip
        return self.page

    def faults(self) -> list[str]:
        """What axe finds on the page, and whether something is wider than the window."""
        found = Axe().run(self.page, options=RULES).response["violations"]
        faults = [f"{each['id']}: {node['html'][:120]}" for each in found for node in each["nodes"]]
        wide = self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        return faults + (["wider than the window"] if wide else [])
