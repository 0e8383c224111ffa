"""Long real English text that every machine with Python has: what the standard library says about itself."""

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence

MODULES = (
    "argparse", "ast", "asyncio.base_events", "asyncio.events", "asyncio.streams", "asyncio.tasks", "base64", "bisect",
    "calendar", "cmd", "codecs", "collections", "concurrent.futures._base", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "email.message", "email.policy", "enum",
    "filecmp", "fileinput", "fractions", "ftplib", "functools", "gettext", "glob", "gzip", "heapq", "hmac",
    "html.parser", "http.client", "http.cookies", "imaplib", "inspect", "io", "ipaddress", "itertools", "json",
    "locale", "logging", "logging.handlers", "mailbox", "math", "mimetypes", "multiprocessing.managers", "optparse",
    "os", "pathlib", "pdb", "pickle", "pickletools", "platform", "plistlib", "poplib", "pprint", "queue", "random",
    "re", "secrets", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "statistics",
    "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback",
    "types", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "warnings", "weakref",
    "xml.dom.minidom", "xml.etree.ElementTree", "zipfile",
)  # fmt: skip
_SENTENCES = re.compile(r"[A-Z][a-z].*[.:]\Z", re.DOTALL)
_SHORTEST = 80


def paragraphs() -> Iterator[str]:
    """Paragraphs of prose from docstrings, each once, under a heading for every module."""
    seen: set[str] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        yield f"## The module {name}"
        for item in (module, *(value for _, value in sorted(vars(module).items()) if _is_own(value, name))):
            for text in _prose(inspect.getdoc(item) or ""):
                if text not in seen:
                    seen.add(text)
                    yield text


def with_facts(n_chars: int, facts: Sequence[str]) -> str:
    """Markdown of about so many characters; the facts stand in paragraphs of their own, at equal distances."""
    parts: list[str] = []
    length = 0
    for text in paragraphs():
        if length >= n_chars:
            return "\n\n".join(parts)
        planted = len([part for part in parts if part in facts])
        if planted < len(facts) and length >= n_chars * (2 * planted + 1) / (2 * len(facts)):
            parts.append(facts[planted])
        parts.append(text)
        length += len(text) + 2
    raise AssertionError(f"the standard library has only {length} characters of prose")


def _is_own(value: object, module: str) -> bool:
    return getattr(value, "__module__", None) == module and (inspect.isclass(value) or inspect.isfunction(value))


def _prose(doc: str) -> Iterator[str]:
    for part in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        text = " ".join(part.split())
        if len(text) >= _SHORTEST and _SENTENCES.match(text) and ">>>" not in text:
            yield text
