"""The parser process: ``python -m ingest.worker``. Reads one ParseRequest, writes messages, ends.

It limits itself before it opens the file, and dies with its parent: its standard input stays open for as
long as someone waits for the answer.
"""

import logging
import os
import resource
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ingest.errors import DamagedFile, IngestError, ParserMemory
from ingest.extract import extract
from ingest.limits import ParseLimits
from ingest.wire import Message, ParseRequest, Refused, Started, pack, read_request

_MAX_OPEN_FILES = 64


def main() -> None:
    """Parse the requested file; the exit status is 0 whenever a last message was written."""
    _keep_quiet()
    request = read_request(sys.stdin.buffer)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    confine(request.limits)
    _write(Started())
    for message in _messages(request):
        _write(message)
    sys.stdout.buffer.close()
    # Tearing down a large object graph takes seconds that nobody needs.
    os._exit(0)


def confine(limits: ParseLimits) -> None:
    """Let the kernel enforce memory, processor time, and that nothing is written or dumped."""
    _limit(resource.RLIMIT_AS, limits.memory_nbytes)
    # At the soft limit comes a signal that tells why; at the hard one only a kill.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 5))
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _keep_quiet() -> None:
    # pypdf logs object contents; they are the document's text.
    logging.disable()
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True


def _messages(request: ParseRequest) -> Iterator[Message]:
    try:
        yield from extract(Path(request.path), request.limits, request.password)
        return
    except IngestError as error:
        refusal = error
    except MemoryError:
        refusal = ParserMemory(request.limits.memory_nbytes)
    except RecursionError:
        refusal = DamagedFile("its contents are nested too deeply")
    # Outside the handlers, so that the failed frames and all they hold are free before anything is packed.
    yield Refused(refusal.code, refusal.params)


def _write(message: Message) -> None:
    sys.stdout.buffer.write(pack(message))
    sys.stdout.buffer.flush()


def _die_with_parent() -> NoReturn:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
