"""Values of many megabytes from a Redis connection straight into memory of ours.

redis-py parses a reply into objects of its own, which costs a copy or two of each value; here only the reply's length
is parsed. Everything else (addresses, passwords, TLS, time-outs) stays with redis-py.
"""

import socket
from typing import Any

from redis.exceptions import ResponseError

from cache_store.tiers.tier import Arrived, silent

_LONGEST_LINE = 512
_STEP_NBYTES = 1 << 20
"""Taken at once: what has just arrived is looked at while it is in the processor's cache, and Redis goes on sending."""


def read_value(connection: Any, memory: memoryview, *command: str, arrived: Arrived = silent) -> int:
    """Send a command whose reply is one value, and put that into `memory`; how many bytes there were, 0 for none. Of a
    value that is longer than `memory` nothing is read, and one byte more than that is told. `arrived` is told how many
    bytes there are after each step.

    Raises OSError and ResponseError; the connection must be given up after either, and after a value too long.
    """
    connection.send_command(*command)
    # No public call of redis-py gives the socket.
    sock: socket.socket = connection._sock
    head = _line(sock)
    if head[:1] == b"-":
        raise ResponseError(head[1:].decode(errors="replace"))
    if head[:1] == b"_":
        return 0
    if head[:1] != b"$":
        raise ResponseError(f"a reply that is no value: {head[:40]!r}")
    nbytes = int(head[1:])
    if nbytes < 0:
        return 0
    if nbytes > len(memory):
        return len(memory) + 1
    _fill(sock, memory[:nbytes], arrived)
    _fill(sock, memoryview(bytearray(2)))
    return nbytes


def _line(sock: socket.socket) -> bytes:
    """Up to the end of a line. Byte by byte, so that nothing of what follows is taken: a line has about ten."""
    line = bytearray()
    while not line.endswith(b"\r\n"):
        byte = sock.recv(1)
        if not byte or len(line) > _LONGEST_LINE:
            raise ConnectionError("the connection ended within a reply")
        line += byte
    return bytes(line[:-2])


def _fill(sock: socket.socket, memory: memoryview, arrived: Arrived = silent) -> None:
    done = 0
    while done < len(memory):
        n = sock.recv_into(memory[done : done + _STEP_NBYTES])
        if not n:
            raise ConnectionError("the connection ended within a value")
        done += n
        arrived(done)
