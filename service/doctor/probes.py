"""Where checks take their facts from: a Protocol, and the machine itself."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from service.doctor.facts import MemoryFacts, RedisFacts, TorchFacts
from service.engine.llama_engine.library import gpu_backends
from service.planning.nvidia import CardState, read_cards

_TORCH_S = 120.0
_READ_NBYTES = 64 << 20
_ENGINE = re.compile(rb"service\.engine\.remote\.server")
_OURS = re.compile(rb"service\.engine\.remote\.server|service\.cli|bin/preread")
_ASK_TORCH = """
import json, importlib.metadata as m, importlib.util as u
facts = {}
try:
    import torch
    facts = {"version": torch.__version__, "cuda": torch.version.cuda or "", "available": torch.cuda.is_available()}
    flags = torch._C._cuda_getArchFlags() if torch.version.cuda else ""
    facts["archs"] = (flags or "").split()
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}"
if u.find_spec("exllamav2"):
    facts["exllamav2"] = m.version("exllamav2")
    if u.find_spec("exllamav2_ext"):
        try:
            import exllamav2_ext
        except Exception as error:
            facts["extension_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(facts))
"""


class Probes(Protocol):
    """Facts about a machine. Each is asked when a check needs it; none changes anything."""

    def cards(self) -> list[CardState]:
        """NVIDIA cards, [] where no driver answers."""
        ...

    def torch(self) -> TorchFacts: ...

    def llama_backends(self) -> list[str] | None:
        """GPU backends of the installed llama.cpp; None where it is not installed."""
        ...

    def extension_archs(self) -> list[str]:
        """Generations that exllamav2's extension was compiled for here, [] where that is not known."""
        ...

    def nvcc(self) -> str:
        """Release of CUDA's compiler, such as "12.6"; "" where there is none."""
        ...

    def memory(self) -> MemoryFacts: ...

    def engines_nbytes(self) -> int:
        """Memory that engines of Preread hold here already."""
        ...

    def governors(self) -> set[str]:
        """How the system chooses the processor's clock; empty where it does not say."""
        ...

    def cores(self) -> float:
        """Cores that this process may use: those of the machine, or the share a container has."""
        ...

    def default_threads(self) -> int:
        """Threads that compute where nobody says how many: libraries do not look at a container's share."""
        ...

    def processor_flags(self) -> set[str]:
        """What the processor can do, as /proc/cpuinfo names it."""
        ...

    def read_gbps(self, directory: Path) -> float:
        """What the disk of a directory reads, in GB/s. Raises OSError."""
        ...

    def redis(self, url: str) -> RedisFacts:
        """Raises ConnectionError, with a sentence."""
        ...

    def environment(self) -> Mapping[str, str]: ...


class SystemProbes:
    """This machine. `proc`, `sys_root` and `cgroup` are where the kernel's files are."""

    def __init__(
        self, proc: Path = Path("/proc"), sys_root: Path = Path("/sys"), environment: Mapping[str, str] | None = None
    ) -> None:
        self._proc = proc
        self._sys = sys_root
        self._environment = os.environ if environment is None else environment
        self._cards: list[CardState] | None = None
        self._torch: TorchFacts | None = None

    def cards(self) -> list[CardState]:
        if self._cards is None:
            self._cards = read_cards()
        return self._cards

    def torch(self) -> TorchFacts:
        if self._torch is None:
            self._torch = _ask_torch()
        return self._torch

    def llama_backends(self) -> list[str] | None:
        return gpu_backends()

    def extension_archs(self) -> list[str]:
        base = self._environment.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
        found: set[str] = set()
        for path in (*Path(base).glob("exllamav2_ext/build.ninja"), *Path(base).glob("*/exllamav2_ext/build.ninja")):
            found |= set(re.findall(r"code=(sm_\d+)", path.read_text("utf-8", "replace")))
        return sorted(found)

    def nvcc(self) -> str:
        home = self._environment.get("CUDA_HOME")
        command = shutil.which("nvcc", path=f"{home}/bin" if home else self._environment.get("PATH"))
        if command is None:
            return ""
        try:
            output = subprocess.run(
                [command, "--version"], capture_output=True, text=True, timeout=15, check=True
            ).stdout
        except (subprocess.SubprocessError, OSError):
            return ""
        found = re.search(r"release (\d+\.\d+)", output)
        return found.group(1) if found else ""

    def memory(self) -> MemoryFacts:
        table = _kib_table(self._proc / "meminfo")
        total = table.get("SwapTotal", 0)
        return MemoryFacts(table.get("MemAvailable", 0), total, total - table.get("SwapFree", 0), self._swapped())

    def _swapped(self) -> dict[int, int]:
        swapped = {pid: table.get("VmSwap", 0) for pid, table in self._processes(_OURS)}
        return {pid: nbytes for pid, nbytes in swapped.items() if nbytes}

    def engines_nbytes(self) -> int:
        return sum(table.get("RssAnon", 0) + table.get("RssShmem", 0) for _, table in self._processes(_ENGINE))

    def _processes(self, wanted: re.Pattern[bytes]) -> Iterator[tuple[int, dict[str, int]]]:
        """Those whose command is so, and the sizes that the kernel tells of them."""
        for status in self._proc.glob("[0-9]*/status"):
            try:
                if wanted.search((status.parent / "cmdline").read_bytes().replace(b"\0", b" ")):
                    yield int(status.parent.name), _kib_table(status)
            except OSError:  # it has ended
                continue

    def governors(self) -> set[str]:
        files = self._sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
        drivers = self._sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_driver")
        # These raise the clock with the load whatever they are called.
        if any(path.read_text().strip() in ("intel_pstate", "amd-pstate-epp") for path in drivers):
            return set()
        return {path.read_text().strip() for path in files}

    def cores(self) -> float:
        cores = self.default_threads()
        try:
            quota, period = (self._sys / "fs/cgroup/cpu.max").read_text().split()
        except (OSError, ValueError):
            return float(cores)
        return float(cores) if quota == "max" else min(float(cores), int(quota) / int(period))

    def default_threads(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def processor_flags(self) -> set[str]:
        try:
            return set((self._proc / "cpuinfo").read_text().split())
        except OSError:
            return set()

    def read_gbps(self, directory: Path) -> float:
        return _read_gbps(directory)

    def redis(self, url: str) -> RedisFacts:
        try:
            from service.doctor.redis_probe import ask_redis
        except ImportError:
            raise ConnectionError("Python's package redis is missing: pip install '.[redis]'") from None

        return ask_redis(url)

    def environment(self) -> Mapping[str, str]:
        return self._environment


def _ask_torch() -> TorchFacts:
    """In a process of its own: a torch that does not fit its libraries can end it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_S, check=False
        )
    except subprocess.SubprocessError as error:
        return TorchFacts(error=str(error))
    try:
        return msgspec.convert(json.loads(done.stdout.splitlines()[-1]), TorchFacts)
    except (ValueError, IndexError):
        return TorchFacts(error=f"importing torch ended with status {done.returncode}: {done.stderr[-300:].strip()}")


def _kib_table(path: Path) -> dict[str, int]:
    """Bytes by name of a file of /proc with lines such as `SwapTotal: 12 kB`; others are left out."""
    rows = (line.split() for line in path.read_text("utf-8", "replace").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _read_gbps(directory: Path) -> float:
    """A file is written, forgotten by the page cache where the system does that, and read."""
    with tempfile.TemporaryFile(dir=directory, prefix=".doctor-") as file:
        file.write(os.urandom(_READ_NBYTES))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        buffer = bytearray(8 << 20)
        started = time.perf_counter()
        while file.readinto(buffer):  # type: ignore[attr-defined]
            pass
        return _READ_NBYTES / (time.perf_counter() - started) / 1e9
