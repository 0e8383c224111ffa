"""llama.cpp itself, through the C interface of llama-cpp-python: loaded once, its log kept, its build named."""

import ctypes
import hashlib
import importlib
import logging
import os
from collections import deque
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from service.engine.models.errors import EngineRefused

log = logging.getLogger(__name__)

PACKAGE = "llama-cpp-python"
INSTALL = f".venv/bin/pip install -c constraints.txt -e '.[llamacpp]' in Preread's folder, which compiles {PACKAGE}"
FOR_THE_CARD = (
    "Build it for the card: CMAKE_ARGS='-DGGML_CUDA=on' .venv/bin/pip install --force-reinstall --no-deps "
    f"--no-binary :all: {PACKAGE} in Preread's folder"
)
GPU_BACKENDS = ("cuda", "hip", "vulkan", "metal", "sycl")
KEPT_LINES = 400
DEBUG = 1
"""`GGML_LOG_LEVEL_DEBUG`: hundreds of lines of every context."""
_CHUNK_NBYTES = 8 << 20
_NUMERICS_SWITCH = "LLAMA_ATTN_ROT_DISABLE"
"""A variable of the environment by which llama.cpp stores other values under the same KV type."""

lines: deque[str] = deque(maxlen=KEPT_LINES)
"""What llama.cpp logged last."""


def installed() -> bool:
    return find_spec("llama_cpp") is not None


@cache
def api() -> Any:
    """The functions and structs of `llama.h`. Raises EngineRefused when the package is missing or does not load."""
    os.environ.pop(_NUMERICS_SWITCH, None)
    try:
        found = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise EngineRefused(f"the llamacpp engine needs {PACKAGE} ({error}): {INSTALL}") from None
    except (OSError, RuntimeError) as error:
        raise EngineRefused(f"the library of {PACKAGE} does not load: {error}; install it again: {INSTALL}") from None
    found.llama_log_set(_on_log(found), ctypes.c_void_p())
    found.llama_backend_init()
    return found


@cache
def _on_log(found: Any) -> Any:
    """The callback, which must live as long as the library."""
    part: list[str] = []

    @found.llama_log_callback
    def on_log(level: int, text: bytes, _user_data: Any) -> None:
        if level == DEBUG:
            return
        part.append(text.decode("utf-8", "replace"))
        if part[-1].endswith("\n"):
            line = "".join(part).rstrip()
            part.clear()
            lines.append(line)
            log.debug("%s", line)

    return on_log


def why() -> str:
    """The last lines of the log that speak of an error, for a message."""
    told = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
    return "; ".join(told[-3:]) or "it does not say why"


@cache
def build() -> str:
    """Version of the package and a digest of the libraries it brought: another build may round differently."""
    digest = hashlib.blake2b(digest_size=8)
    for path in _libraries():
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_NBYTES):
                digest.update(chunk)
    return f"{package_version()}-{digest.hexdigest()}"


def package_version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


def _libraries() -> list[Path]:
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    base = Path(folder) if folder else Path(api().__file__).parent / "lib"
    return sorted(path for path in base.iterdir() if ".so" in path.name or path.suffix in (".dylib", ".dll"))


def gpu_backends() -> list[str] | None:
    """The GPU backends that the installed package brought, such as "cuda", by the names of its files, without loading
    it. None when it is not installed."""
    spec = find_spec("llama_cpp")
    if spec is None:
        return None
    files = [
        path.name for place in spec.submodule_search_locations or () for path in Path(place, "lib").glob("*ggml-*")
    ]
    return [name for name in GPU_BACKENDS if any(f"ggml-{name}" in file for file in files)]


def can_offload() -> bool:
    """Whether this build computes on a GPU, and there is one."""
    return bool(api().llama_supports_gpu_offload())


def features() -> str:
    """What this build says of itself: of each backend its name, and what it was compiled with."""
    return bytes(api().llama_print_system_info()).decode("utf-8", "replace")
