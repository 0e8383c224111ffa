"""Whether the time of a refusal tells an owner that something of another exists: ``python -m benchmarks.isolation``.

A real server with the fake engine, two keys of different organizations, and for each call as many requests for what the
other has as for what nobody has, in random order over one connection. Who asks has
sessions of their own, and a document and a session that somebody of their organization shares with them. The figure is
the AUC: how often a request for what exists took longer than one for what does not; 0.5 is a coin. Of 500 requests each
its standard error is 0.018.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from service.core.clock import SystemClock
from service.core.ids import new_id
from service.core.key_ring import KeyRing
from service.core.own_database import own_database
from service.settings import Settings
from tests.e2e.server import Server

QUESTION = {"question": "Who is the keeper?"}
CALLS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "document": ("GET", "/v1/documents/{doc}", None),
    "document, changed": ("PATCH", "/v1/documents/{doc}", {"title": "Mine"}),
    "document, deleted": ("DELETE", "/v1/documents/{doc}", None),
    "page": ("GET", "/v1/documents/{doc}/pages/1", None),
    "events of a document": ("GET", "/v1/documents/{doc}/events", None),
    "file": ("GET", "/v1/documents/{doc}/file", None),
    "new session": ("POST", "/v1/sessions", {"document_ids": ["{doc}"]}),
    "session": ("GET", "/v1/sessions/{ses}", None),
    "session, forked": ("POST", "/v1/sessions/{ses}/fork", {}),
    "question": ("POST", "/v1/sessions/{ses}/questions", QUESTION),
    "answer": ("GET", "/v1/sessions/{ses}/questions/{ans}/events", None),
    "share": ("POST", "/v1/documents/{doc}/shares", {"with": "link"}),
}
KINDS = ("doc", "ses", "ans")


def auc(lower: list[float], higher: list[float]) -> float:
    """How often one of `higher` is above one of `lower`; ties count half."""
    values = np.concatenate([lower, higher])
    order, ranks = values.argsort(), np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    above = ranks[len(lower) :].sum() - len(higher) * (len(higher) + 1) / 2
    return float(above / (len(lower) * len(higher)))


async def make_keys(data_dir: Path) -> dict[str, dict[str, str]]:
    """Headers of two users of different organizations, and of somebody who shares with the second."""
    async with own_database(Settings(data_dir=data_dir, engine="fake")) as database:
        ring = KeyRing(database, SystemClock())
        people = {"ann": "one", "eve": "other", "mia": "other"}
        made = {
            name: await ring.create(user=name, organization=its, scopes=("manage",)) for name, its in people.items()
        }
    return {name: {"Authorization": f"Bearer {token}"} for name, (_, token) in made.items()}


def make_things(client: httpx.Client, n: int) -> list[dict[str, str]]:
    """Documents of the first owner, each with a session and an answer."""
    things = []
    for i in range(n):
        text = f"The keeper of lighthouse {i} is Marta Kovalenko. ".encode() * 20
        doc = client.post("/v1/documents", files={"file": ("a.txt", text)}).json()["id"]
        while client.get(f"/v1/documents/{doc}").json()["status"] != "ready":
            time.sleep(0.02)
        ses = client.post("/v1/sessions", json={"document_ids": [doc]}).json()["id"]
        ans = client.post(f"/v1/sessions/{ses}/questions", json=QUESTION).json()["id"]
        things.append({"doc": doc, "ses": ses, "ans": ans})
    return things


def make_sessions(client: httpx.Client, document_id: str, n: int) -> None:
    for _ in range(n):
        client.post("/v1/sessions", json={"document_ids": [document_id]}).raise_for_status()


def share_with(client: httpx.Client, thing: dict[str, str], user: str) -> None:
    """A document and a session of the client's own."""
    for path in (f"/v1/documents/{thing['doc']}/shares", f"/v1/sessions/{thing['ses']}/shares"):
        client.post(path, json={"with": "user", "user": user}).raise_for_status()


def seconds_of(client: httpx.Client, call: str, ids: dict[str, str]) -> float:
    method, path, body = CALLS[call]
    for kind, id in ids.items():
        path = path.replace(f"{{{kind}}}", id)
    content = None if body is None else json.dumps(body).replace("{doc}", ids["doc"]).encode()
    headers = {"content-type": "application/json"} if content else {}
    began = time.perf_counter()
    response = client.request(method, path, content=content, headers=headers)
    took = time.perf_counter() - began
    assert response.status_code == 404, f"{call}: {response.text}"
    return took


def measure(client: httpx.Client, things: list[dict[str, str]], n: int, seed: int) -> dict[str, dict[str, float]]:
    """Per call: the AUC, and the median milliseconds of both kinds."""
    chance, found = random.Random(seed), {}
    for call in CALLS:
        times: dict[bool, list[float]] = {True: [], False: []}
        kinds = [True] * n + [False] * n
        chance.shuffle(kinds)
        for _ in range(20):
            seconds_of(client, call, {kind: new_id(kind) for kind in KINDS})
        for exists in kinds:
            ids = chance.choice(things) if exists else {kind: new_id(kind) for kind in KINDS}
            times[exists].append(seconds_of(client, call, ids))
        found[call] = {
            "auc": round(auc(times[False], times[True]), 4),
            "existing_ms": round(float(np.median(times[True])) * 1e3, 3),
            "missing_ms": round(float(np.median(times[False])) * 1e3, 3),
        }
        print(f"{call}: {found[call]}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500, help="of each kind, for each call")
    parser.add_argument("--things", type=int, default=20, help="documents of the other owner")
    parser.add_argument("--sessions", type=int, default=500, help="of who asks, about a document of theirs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bound", type=float, default=0.05, help="how far from 0.5 the AUC may be")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        data_dir = Path(directory) / "data"
        headers = asyncio.run(make_keys(data_dir))
        with Server(data_dir, engine="fake", log_level="warning") as server:
            with httpx.Client(base_url=server.url, headers=headers["ann"], timeout=60) as client:
                things = make_things(client, arguments.things)
            with httpx.Client(base_url=server.url, headers=headers["mia"], timeout=60) as client:
                share_with(client, make_things(client, 1)[0], "eve")
            with httpx.Client(base_url=server.url, headers=headers["eve"], timeout=60) as client:
                make_sessions(client, make_things(client, 1)[0]["doc"], arguments.sessions)
                found = measure(client, things, arguments.requests, arguments.seed)
    separable = [call for call, figures in found.items() if abs(figures["auc"] - 0.5) > arguments.bound]
    print(json.dumps({"requests": arguments.requests, "calls": found, "separable": separable}, indent=2))
    return 1 if separable else 0


if __name__ == "__main__":
    raise SystemExit(main())
