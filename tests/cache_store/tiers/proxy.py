"""A proxy before an S3 server, whose answers can be made to fail."""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


class Proxy:
    """Stands before the server; `fault` says what becomes of a request: "", a status such as "503", "cut", "wrong",
    "reset"; of the first `n` only, where that is not None. Requests for a shard are meant, and with `everything` all of
    them; with `methods`, those that have one of them. "stale" is about listings alone: they are as they were when the
    same was listed before, else empty. A server that is gone is a connection that ends."""

    def __init__(self, target: str) -> None:
        self.fault, self.n, self.n_faults, self.everything = "", None, 0, False
        self.methods: frozenset[str] = frozenset()
        self._listed: dict[str, bytes] = {}
        # One for all: making one takes longer than most requests. No connection outlives a server that is killed.
        self._client = httpx.Client(
            verify=False, trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
        )
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "content-length")}
                body = self.rfile.read(length)
                with suppress(OSError, httpx.TransportError):
                    path = proxy.asked(self.command, self.path)
                    answer = proxy._client.request(self.command, target + path, content=body, headers=headers)
                    proxy.answer(self, answer, proxy.is_faulty(self.command, self.path))

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._client.close()

    def asked(self, method: str, path: str) -> str:
        """What the server is asked for; of a listing that is to be an empty one, what is nowhere."""
        is_new = method == "GET" and "list-type=" in path and path not in self._listed
        return path.replace("prefix=", "prefix=nowhere-", 1) if is_new and self.fault == "stale" else path

    def is_faulty(self, method: str, path: str) -> bool:
        meant = method in self.methods if self.methods else self.everything or (method == "GET" and "shard-" in path)
        if self.fault == "stale":
            meant = method == "GET" and "list-type=" in path
        hit = bool(self.fault) and meant and (self.n is None or self.n_faults < self.n)
        self.n_faults += hit
        return hit

    def answer(self, to: BaseHTTPRequestHandler, answer: httpx.Response, faulty: bool) -> None:
        body, status = answer.content, answer.status_code
        fault = self.fault if faulty else ""
        if to.command == "GET" and "list-type=" in to.path:
            if fault == "stale":
                body = self._listed.get(to.path, body)
            else:
                self._listed[to.path] = body
        if fault == "reset":
            to.connection.close()
            return
        if fault.isdigit():
            body, status = b"<Error><Code>SlowDown</Code></Error>", int(fault)
        if fault == "wrong" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        to.send_response(status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "content-encoding"):
                to.send_header(name, value)
        to.send_header("content-length", str(len(body)))
        to.send_header("connection", "close")
        to.end_headers()
        if to.command != "HEAD":
            to.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
