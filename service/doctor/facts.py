"""What probes tell checks."""

from dataclasses import dataclass

import msgspec


class TorchFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The installed torch, asked in a process of its own. `cuda`: the CUDA that it was built for, "" for none; `archs`:
    generations that its kernels were compiled for, such as "sm_90". `exllamav2`: its version, "" where it is missing;
    `extension_error`: why its compiled part cannot be loaded, "" where it can or was never built."""

    version: str = ""
    cuda: str = ""
    archs: list[str] = []
    available: bool = False
    exllamav2: str = ""
    extension_error: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes of memory that is available and of swap in use; `swapped`: Preread's processes of which a part lies there,
    with its bytes."""

    available_nbytes: int
    swap_total_nbytes: int
    swap_used_nbytes: int
    swapped: dict[int, int]


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """What a Redis says of itself. `save`: its rule for writing snapshots of its own, None where it does not tell."""

    version: str
    maxmemory: int
    policy: str
    appendonly: bool
    save: str | None
    used_nbytes: int
