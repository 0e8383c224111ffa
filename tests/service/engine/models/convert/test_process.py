"""The converting process, as a few lines of Python that say and do what exllamav2's converter does."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.engine.models.convert.process import ConversionFailed, run_child
from service.engine.models.convert.work import LOG_NAME
from service.engine.models.errors import EngineRefused, ModelImportError, SourceRefused
from service.engine.models.source import silent

Command = tuple[str, ...]


@pytest.fixture
def child(tmp_path: Path) -> Callable[[str], Command]:
    """A program of these lines; it is given the work directory."""

    def make(body: str) -> Command:
        path = tmp_path / "child.py"
        path.write_text("import os, sys, time\n" + textwrap.dedent(body))
        return sys.executable, "-u", str(path)

    return make


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_how_far_it_is_is_told_and_the_rest_goes_to_the_log(child: Callable[[str], Command], work: Path) -> None:
    told: list[tuple[str, int, int]] = []
    lines = """
        print('[STATUS]{"stage": "Measuring", "completion": 0.25}[/STATUS]')
        print(' -- Layer: model.layers.0 (Attention)')
        print('[STATUS]{"stage": "Tokenizing (1)", "completion": 1}[/STATUS]')
        print('[STATUS]{"stage": "Quantizing", "completion": 0.5}[/STATUS]')
        print(sys.argv[1])
    """
    run_child(work, lambda *args: told.append(args), child(lines))
    assert told == [("measuring choices (1 of 2)", 2500, 10000), ("quantizing (2 of 2)", 5000, 10000)]
    assert (work / LOG_NAME).read_text() == f" -- Layer: model.layers.0 (Attention)\n{work}\n"


@pytest.mark.parametrize(
    ("lines", "error", "says"),
    [
        ("""print('[ERROR]{"kind": "refused", "message": "a reason"}'); sys.exit(1)""", SourceRefused, "^a reason$"),
        (
            """print('[ERROR]{"kind": "memory", "message": "x"}'); sys.exit(1)""",
            ConversionFailed,
            "memory did not suffice",
        ),
        ("""print('[ERROR]{"kind": "disk", "message": "x"}'); sys.exit(1)""", ConversionFailed, "the disk is full"),
        (
            """print('[ERROR]{"kind": "extension", "message": "nvcc"}'); sys.exit(1)""",
            EngineRefused,
            "nvcc.*compile it",
        ),
        (
            """print('[ERROR]{"kind": "converter", "message": "ValueError: q"}'); sys.exit(1)""",
            ConversionFailed,
            "Error: q",
        ),
        ("""print(' ## Measurement/inference error (3): q'); os._exit(1)""", ConversionFailed, "range of FP16"),
        ("""print(' ## Unable to fit'); print('more'); os._exit(1)""", ConversionFailed, "result: Unable to fit;"),
        ("os.kill(os.getpid(), 9)", ConversionFailed, "killed by signal 9"),
        ("sys.exit(4)", ConversionFailed, "exit code 4"),
    ],
)
def test_what_went_wrong_is_a_sentence_that_says_what_to_do(
    child: Callable[[str], Command], work: Path, lines: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        run_child(work, silent, child(lines))
    assert isinstance(raised.value, ModelImportError)
    if error is ConversionFailed:
        assert "run the same command to go on" in str(raised.value)


def test_an_error_here_ends_the_child(child: Callable[[str], Command], work: Path) -> None:
    lines = """
        open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))
        print('[STATUS]{"stage": "Measuring", "completion": 0.1}[/STATUS]')
        time.sleep(60)
    """

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(work, interrupted, child(lines))
    with pytest.raises(ProcessLookupError):
        os.kill(int((work / "pid").read_text()), 0)


def test_the_child_ends_when_this_process_is_killed(tmp_path: Path, work: Path) -> None:
    """By the end of its standard input, whatever it does then."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, sys, threading, time\n"
        "from service.engine.models.convert.child import _end_with_parent\n"
        "threading.Thread(target=_end_with_parent, daemon=True).start()\n"
        "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys; from pathlib import Path; from service.engine.models.convert.process import run_child; "
            f"run_child(Path({str(work)!r}), lambda *_: None, (sys.executable, {str(child)!r}))",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    pid = int(_soon(lambda: (work / "pid").read_text()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _soon(lambda: "" if Path(f"/proc/{pid}/stat").exists() and _state(pid) not in "ZX" else "gone")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _soon(look: Callable[[], str]) -> str:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            if found := look():
                return found
        except OSError:
            pass
        time.sleep(0.02)
    raise AssertionError("nothing came of it")
