"""Real servers for the tiers, each a process of its own on a free port of the loopback."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import obstore
from obstore.store import S3Store
from redis import Redis

BUCKET = "preread-test"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


def free_port() -> int:
    """Below those that systems give to connections and to whoever asks for any: nobody gets it between now and when its
    server binds it, nor while that is killed and started again."""
    while True:
        port = random.SystemRandom().randrange(11_000, 30_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """Debian's redis-server, with nothing on disk."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(directory), *options,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        client = self.client()
        until = time.monotonic() + 60
        while True:
            try:
                client.ping()
                break
            except OSError:
                assert time.monotonic() < until, "redis-server does not answer"
                time.sleep(0.02)
        client.close()

    def client(self) -> Redis:
        return Redis(port=self.port, socket_timeout=5)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class S3Server:
    """moto's server. `url` is that of an empty bucket; `environment` is what a client needs."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.url = f"s3://{BUCKET}/store"
        self.environment = CREDENTIALS | {"AWS_ENDPOINT": self.endpoint}
        self.start()

    def start(self) -> None:
        """Empty, but for the bucket. Again on the same port after `kill`."""
        # moto asks the machine for credentials of its own where it finds none.
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | CREDENTIALS,
        )  # fmt: skip
        until = time.monotonic() + 60
        while True:
            try:
                if httpx.put(f"{self.endpoint}/{BUCKET}").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < until, "moto does not answer"
            time.sleep(0.05)

    def names(self) -> list[str]:
        """Names of all objects."""
        text = httpx.get(f"{self.endpoint}/{BUCKET}?list-type=2", timeout=60).text
        return [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]

    def body(self, name: str) -> bytes:
        """The bytes of an object."""
        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region=CREDENTIALS["AWS_REGION"],
            client_options={"allow_http": True},
        )
        return bytes(obstore.get(store, name).bytes())

    def clear(self) -> None:
        httpx.post(f"{self.endpoint}/moto-api/reset", timeout=60)
        httpx.put(f"{self.endpoint}/{BUCKET}")

    def kill(self) -> None:
        """With all that it holds: moto keeps objects in its memory."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
