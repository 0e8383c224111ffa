"""Sends calls, again where that is safe."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, TypeVar

import httpx

from service.client.attempts import Attempts
from service.client.calls import Call
from service.client.connection import Connection, request_options, result_of
from service.client.errors import APIError, failed_connection, refusal
from service.client.following import Following
from service.client.sse import Parser

T = TypeVar("T")


class Transport:
    """One pool of connections. Threads may share it."""

    def __init__(self, connection: Connection) -> None:
        self.url = connection.url
        self.patience = connection.patience
        self._http = httpx.Client(**connection.options())

    def close(self) -> None:
        self._http.close()

    def send(self, call: Call[T]) -> T:
        """Raises PrereadError."""
        attempts = Attempts(call, self.patience, self.url)
        while True:
            try:
                with self.opened(call) as response:
                    response.read()
                    return result_of(call, response)
            except httpx.TransportError as error:
                wait_s = attempts.after_loss(error)
            except APIError as error:
                wait_s = attempts.after_refusal(error)
            time.sleep(wait_s)

    def send_once(self, call: Call[T]) -> T:
        """Without trying again. Raises PrereadError."""
        try:
            with self.opened(call) as response:
                response.read()
                return result_of(call, response)
        except httpx.TransportError as error:
            raise failed_connection(error, self.url) from error

    @contextmanager
    def opened(self, call: Call) -> Iterator[httpx.Response]:
        """A success whose body was not read yet. Raises APIError, httpx.TransportError."""
        request = self._http.build_request(call.method, call.path, **request_options(call))
        response = self._http.send(request, stream=True)
        try:
            if not response.is_success:
                response.read()
                raise refusal(response)
            yield response
        finally:
            response.close()

    def save(self, call: Call[bytes], to: BinaryIO) -> None:
        """Write a body to an empty file while it comes, from its beginning when the connection is lost. Raises
        PrereadError, OSError."""
        attempts = Attempts(call, self.patience, self.url)
        while True:
            try:
                with self.opened(call) as response:
                    for piece in response.iter_bytes():
                        to.write(piece)
                    return
            except httpx.TransportError as error:
                if not to.seekable():
                    raise failed_connection(error, self.url) from error
                wait_s = attempts.after_loss(error)
                to.seek(0)
                to.truncate()
            except APIError as error:
                wait_s = attempts.after_refusal(error)
            time.sleep(wait_s)

    def follow(self, following: Following[T]) -> Iterator[T]:
        """What a stream tells, taken up again where it was lost. Raises PrereadError."""
        while not following.is_over:
            try:
                with self.opened(following.call()) as response:
                    following.opened(response)
                    parser = Parser()
                    for event in (event for chunk in response.iter_bytes() for event in parser.feed(chunk)):
                        if (told := following.heard(event)) is not None:
                            yield told
                        if following.is_over:
                            return
                if following.is_over:
                    return
                wait_s = following.broken(None)
            except httpx.TransportError as error:
                wait_s = following.broken(error)
            except APIError as error:
                wait_s = following.refused(error)
            time.sleep(wait_s)
