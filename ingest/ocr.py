"""Text recognition by Tesseract, where it is installed: a program of its own, one page at a time.

It is started by the parser process, within whose limits of memory and processor time it runs, and ends with it.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass

from ingest.limits import ParseLimits

_LEAST_LETTERS = 3
_LETTER = re.compile(r"[^\W_]")
_LISTING_S = 20
_LIBC = ctypes.CDLL(None)
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


@dataclass(frozen=True, slots=True)
class Recognizer:
    """`command` is a path, `languages` are installed ones; `missing` were asked for and are not."""

    command: str
    languages: tuple[str, ...]
    missing: tuple[str, ...]
    turns_pages: bool
    page_s: float

    def read(self, picture: bytes) -> str | None:
        """The text in a picture, "" when there is none, None when it took too long or Tesseract failed."""
        # 1 finds out which way is up; 3 takes the page as it is.
        how = ["-l", "+".join(self.languages), "--psm", "1" if self.turns_pages else "3", "--dpi", "300"]
        output = _output([self.command, "stdin", "stdout", *how], picture, self.page_s)
        if output is None:
            return None
        text = output.decode(errors="replace").replace("\f", "\n")
        return text if len(_LETTER.findall(text)) >= _LEAST_LETTERS else ""


def find_recognizer(limits: ParseLimits) -> tuple[Recognizer | None, str]:
    """Tesseract within `limits`, or None; and how that came out: ``ready``, ``off``, ``absent``, ``no_language``."""
    if not limits.ocr_languages:
        return None, "off"
    command = shutil.which("tesseract")
    listing = _output([command, "--list-langs"], b"", _LISTING_S) if command else None
    if command is None or listing is None:
        return None, "absent"
    installed = set(listing.decode(errors="replace").split())
    wanted = limits.ocr_languages.split("+")
    usable = tuple(language for language in wanted if language in installed)
    if not usable:
        return None, "no_language"
    missing = tuple(language for language in wanted if language not in installed)
    return Recognizer(command, usable, missing, "osd" in installed, limits.ocr_page_s), "ready"


def _output(command: list[str], given: bytes, within_s: float) -> bytes | None:
    """What a command says; None when it fails or takes too long, in which case it is killed."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TESSDATA_PREFIX") if name in os.environ}
    try:
        return subprocess.run(
            command,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=within_s,
            check=True,
            # As many threads as cores make one page hardly faster, and everything else slower.
            env={**kept, "OMP_THREAD_LIMIT": "1"},
            preexec_fn=_die_with_parent,
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return None


def _die_with_parent() -> None:
    with contextlib.suppress(AttributeError, OSError):
        _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
