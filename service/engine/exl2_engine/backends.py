"""Which code works on KV on a given device."""

from importlib.util import find_spec
from typing import Literal

import torch

from cache_store.layout import KVLayout
from service.engine.exl2_engine.backend import KVBackend
from service.engine.exl2_engine.portable import PortableBackend
from service.engine.exl2_engine.sdpa import Method

Choice = Literal["auto", "triton", "portable"]


def select_backend(
    layout: KVLayout, device: torch.device | str, choice: Choice = "auto", method: Method | None = None
) -> KVBackend:
    """Triton kernels on sm_80 and newer where Triton is installed, plain torch elsewhere; `choice` forces one.

    `method` forces the attention kernel of document chunks. Raises ValueError when Triton is asked for on a device
    that it does not reach.
    """
    device = torch.device(device)
    problem = _why_not_triton(device)
    if choice == "triton" and problem:
        raise ValueError(f"the Triton kernels cannot be used: {problem}")
    if choice == "portable" or problem:
        return PortableBackend(layout, device, method)
    from service.engine.exl2_engine.triton_backend import TritonBackend

    return TritonBackend(layout, method)


def _why_not_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"they need an NVIDIA card, not the device {device.type}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"they need a card of sm_80 or newer, not sm_{capability[0]}{capability[1]}"
    return None if find_spec("triton") else "triton is not installed"
