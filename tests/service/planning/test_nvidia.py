"""What the driver says, by a program in place of nvidia-smi and a module in place of NVML."""

import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.doctor.probes import SystemProbes
from service.planning.nvidia import ENGINE, CardProcess, _process_name, read_cards

MIB = 1 << 20
SMI = """#!/bin/sh
case "$1" in
  --query-gpu*)
    printf "0, Tesla V100-SXM2-16GB, 16160, 410, 15750, 535.104.05, 7.0, 83, 0x0000000000000024, "
    echo "1, 3, 8, 16, Disabled, 1200, 1530, GPU-1";;
  --query-compute*) echo "GPU-1, 4242, /opt/other/app, 300"; echo "GPU-2, 1, x, [N/A]";;
  *) echo "| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2 |";;
esac
"""


def put(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def without_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_nvidia_smi_is_asked_where_there_is_no_nvml(without_nvml: Path) -> None:
    assert read_cards() == []
    put(without_nvml, "nvidia-smi", SMI)
    (card,) = read_cards()
    assert (card.name, card.total_nbytes, card.free_nbytes) == ("Tesla V100-SXM2-16GB", 16160 * MIB, 15750 * MIB)
    assert (card.cuda, card.capability, card.driver) == ((12, 2), (7, 0), "535.104.05")
    assert card.throttles == ["software power cap", "software thermal slowdown"]
    assert (card.pcie_width, card.pcie_max_width, card.persistence) == (8, 16, False)
    assert card.processes == (CardProcess(4242, "/opt/other/app", 300 * MIB),)


def test_an_nvidia_smi_that_fails_is_no_card(without_nvml: Path) -> None:
    put(without_nvml, "nvidia-smi", "#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert read_cards() == []
    put(without_nvml, "nvidia-smi", "#!/bin/sh\necho '0, half a line'\n")
    assert read_cards() == []


class NVMLError(Exception):
    pass


class Nvml:
    """As `pynvml`, with one card that does not tell everything."""

    NVMLError = NVMLError

    def __init__(self, *, broken: bool = False) -> None:
        self.broken, self.open = broken, False

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError("driver not loaded")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def __getattr__(self, name: str):
        answers = {
            "nvmlSystemGetDriverVersion": "580.65", "nvmlSystemGetCudaDriverVersion": 13000, "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "card", "nvmlDeviceGetName": b"NVIDIA L4",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100 * MIB, used=10 * MIB, free=90 * MIB),
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=0, usedGpuMemory=None)],
            "nvmlDeviceGetCudaComputeCapability": (8, 9), "nvmlDeviceGetMaxClockInfo": 6251,
            "nvmlDeviceGetMemoryBusWidth": 192, "nvmlDeviceGetCurrPcieLinkWidth": 16,
        }  # fmt: skip
        if name in answers:
            return lambda *arguments: answers[name]

        def unsupported(*arguments: object) -> None:
            raise NVMLError("not supported")

        return unsupported


def test_nvml_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (card,) = read_cards()
    assert (card.name, card.total_nbytes, card.cuda, card.capability) == ("NVIDIA L4", 100 * MIB, (13, 0), (8, 9))
    assert card.bandwidth_gbps == pytest.approx(300, rel=0.01)
    assert (card.pcie_width, card.throttle_bits, card.persistence) == (16, 0, None)
    assert not nvml.open


def test_an_engine_of_preread_is_known_by_its_module() -> None:
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    for words, name in (([ENGINE], f"{sys.executable} -m {ENGINE}"), (["--password", "secret"], sys.executable)):
        with subprocess.Popen([sys.executable, "-c", code, *words], **pipes) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert CardProcess(process.pid, _process_name(process.pid), 1).name == name
    assert CardProcess(1, f"python -m {ENGINE}", 1).is_engine


def test_an_nvml_without_a_driver_leaves_it_to_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=True))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    put(tmp_path, "nvidia-smi", SMI)
    assert [card.name for card in read_cards()] == ["Tesla V100-SXM2-16GB"]


def test_what_was_compiled_is_read_from_files_and_the_compiler(tmp_path: Path) -> None:
    built = tmp_path / "ext" / "py311_cu126" / "exllamav2_ext"
    built.mkdir(parents=True)
    (built / "build.ninja").write_text("cuda_cflags = -gencode=arch=compute_90,code=sm_90 -gencode=arch=x,code=sm_70\n")
    home = tmp_path / "cuda" / "bin"
    home.mkdir(parents=True)
    put(home, "nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.85'\n")
    probes = SystemProbes(environment={"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"), "CUDA_HOME": str(home.parent)})
    assert probes.extension_archs() == ["sm_70", "sm_90"]
    assert probes.nvcc() == "12.6"
    assert SystemProbes(environment={"PATH": str(tmp_path)}).nvcc() == ""


def test_the_installed_torch_is_asked_in_a_process_of_its_own() -> None:
    import torch

    facts = SystemProbes(environment={}).torch()
    assert facts.version == torch.__version__
    assert facts.error == ""
