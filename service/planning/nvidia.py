"""What the driver says of the machine's cards: through NVML where `nvidia-ml-py` is installed, else `nvidia-smi`."""

import csv
import importlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
ENGINE = "service.engine.remote.server"
_QUERY_S = 15.0
THROTTLES = {
    0x4: "software power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "hardware power brake",
}  # fmt: skip
"""Bits of NVML's reasons for lower clocks that cost speed; others are idleness and settings."""
_FIELDS = (
    "index", "name", "memory.total", "memory.used", "memory.free", "driver_version", "compute_cap", "temperature.gpu",
    "clocks_throttle_reasons.active", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
    "pcie.link.width.max", "persistence_mode", "clocks.current.sm", "clocks.max.sm", "uuid",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A process that computes on a card."""

    pid: int
    name: str
    nbytes: int

    @property
    def is_engine(self) -> bool:
        """Whether it is an engine of Preread."""
        return ENGINE in self.name


@dataclass(frozen=True, slots=True)
class CardState:
    """One card as its driver sees it now. None and 0 stand for what the driver does not say.

    `index`: among the driver's cards, which CUDA may number otherwise.
    `cuda`: the newest CUDA that the driver runs, as (13, 0). `bandwidth_gbps`: by clock and width of its memory, 0
    where not told.
    """

    index: int
    name: str
    total_nbytes: int
    used_nbytes: int
    free_nbytes: int
    driver: str
    cuda: tuple[int, int] | None = None
    capability: tuple[int, int] | None = None
    temperature_c: int = 0
    throttle_bits: int = 0
    pcie_gen: int = 0
    pcie_max_gen: int = 0
    pcie_width: int = 0
    pcie_max_width: int = 0
    persistence: bool | None = None
    sm_mhz: int = 0
    max_sm_mhz: int = 0
    bandwidth_gbps: float = 0.0
    processes: tuple[CardProcess, ...] = ()
    uuid: str = ""

    @property
    def throttles(self) -> list[str]:
        """Why its clocks are lower than they could be, in words."""
        return [name for bit, name in THROTTLES.items() if self.throttle_bits & bit]

    @property
    def engines_nbytes(self) -> int:
        """What engines of Preread hold of it."""
        return sum(process.nbytes for process in self.processes if process.is_engine)


def read_cards() -> list[CardState]:
    """All cards in the order of the PCI bus, [] where no driver answers; `visible` says which of them CUDA shows."""
    try:
        return _by_nvml(importlib.import_module("pynvml"))
    except ImportError:
        return _by_smi()
    except Exception as error:  # an NVMLError: a class that exists only where the module does
        if not type(error).__name__.startswith("NVMLError"):
            raise
        return _by_smi()


def _by_nvml(nvml: Any) -> list[CardState]:
    nvml.nvmlInit()
    try:
        driver, cuda = _text(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
        return [_nvml_card(nvml, i, driver, cuda) for i in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _nvml_card(nvml: Any, index: int, driver: str, cuda: int) -> CardState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any, default: Any = 0) -> Any:
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # not every card, nor every driver, knows all
            return default

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes = ask("ComputeRunningProcesses", default=())
    persistence = ask("PersistenceMode", default=None)
    sm, mem = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
    return CardState(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_nbytes=int(memory.total),
        used_nbytes=int(memory.used),
        free_nbytes=int(memory.free),
        driver=driver,
        cuda=(cuda // 1000, cuda % 1000 // 10),
        capability=ask("CudaComputeCapability", default=None),
        temperature_c=ask("Temperature", 0),
        throttle_bits=ask("CurrentClocksThrottleReasons"),
        pcie_gen=ask("CurrPcieLinkGeneration"),
        pcie_max_gen=ask("MaxPcieLinkGeneration"),
        pcie_width=ask("CurrPcieLinkWidth"),
        pcie_max_width=ask("MaxPcieLinkWidth"),
        persistence=None if persistence is None else bool(persistence),
        sm_mhz=ask("ClockInfo", sm),
        max_sm_mhz=ask("MaxClockInfo", sm),
        # Memory of two transfers a clock, as all of it is counted.
        bandwidth_gbps=2 * ask("MaxClockInfo", mem) * ask("MemoryBusWidth") / 8 / 1000,
        processes=tuple(CardProcess(p.pid, _process_name(p.pid), int(p.usedGpuMemory or 0)) for p in processes),
        uuid=_text(ask("UUID", default="")),
    )


def _by_smi() -> list[CardState]:
    rows = _smi(f"--query-gpu={','.join(_FIELDS)}")
    if not rows:
        return []
    processes = _smi_processes()
    cuda = _smi_cuda()
    return [
        _smi_card(dict(zip(_FIELDS, row, strict=True)), cuda, processes) for row in rows if len(row) == len(_FIELDS)
    ]


def _smi_card(row: dict[str, str], cuda: tuple[int, int] | None, processes: dict[str, list[CardProcess]]) -> CardState:
    major, _, minor = row["compute_cap"].partition(".")
    known = major.isdigit() and minor.isdigit()
    return CardState(
        index=_number(row["index"]),
        name=row["name"],
        total_nbytes=_number(row["memory.total"]) * MIB,
        used_nbytes=_number(row["memory.used"]) * MIB,
        free_nbytes=_number(row["memory.free"]) * MIB,
        driver=row["driver_version"],
        cuda=cuda,
        capability=(int(major), int(minor)) if known else None,
        temperature_c=_number(row["temperature.gpu"]),
        throttle_bits=_number(row["clocks_throttle_reasons.active"]),
        pcie_gen=_number(row["pcie.link.gen.current"]),
        pcie_max_gen=_number(row["pcie.link.gen.max"]),
        pcie_width=_number(row["pcie.link.width.current"]),
        pcie_max_width=_number(row["pcie.link.width.max"]),
        persistence={"Enabled": True, "Disabled": False}.get(row["persistence_mode"]),
        sm_mhz=_number(row["clocks.current.sm"]),
        max_sm_mhz=_number(row["clocks.max.sm"]),
        processes=tuple(processes.get(row["uuid"], ())),
        uuid=row["uuid"],
    )


def _smi_processes() -> dict[str, list[CardProcess]]:
    found: dict[str, list[CardProcess]] = {}
    for row in _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        if len(row) == 4:
            pid = _number(row[1])
            name = _process_name(pid)
            process = CardProcess(pid, name if ENGINE in name else row[2], _number(row[3]) * MIB)
            found.setdefault(row[0], []).append(process)
    return found


def _smi_cuda() -> tuple[int, int] | None:
    """Only the headline of its plain output says which CUDA the driver runs."""
    output = _run([])
    version = output.partition("CUDA Version:")[2].split()
    major, _, minor = version[0].partition(".") if version else ("", "", "")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _smi(query: str) -> list[list[str]]:
    lines = _run([query, "--format=csv,noheader,nounits"]).splitlines()
    return [[cell.strip() for cell in row] for row in csv.reader(lines) if row]


def _run(arguments: Sequence[str]) -> str:
    """What nvidia-smi says, "" where there is none, it fails, or it hangs as it does when a card fell off."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=_QUERY_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return ""
    return done.stdout


def _number(text: str) -> int:
    """0 for "[N/A]" and the like."""
    try:
        return int(text, 0) if text.startswith("0x") else int(float(text))
    except ValueError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _process_name(pid: int) -> str:
    """Its program; of an engine of Preread also which module that runs. Not more: arguments may be secrets."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return f"{words[0]} -m {ENGINE}" if ENGINE in words[1:] else words[0]
