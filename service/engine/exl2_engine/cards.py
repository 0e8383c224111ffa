"""Which card the engine runs on: one, the first that CUDA shows."""

import logging
from importlib.util import find_spec

import torch

from service.engine.models.errors import EngineRefused

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (7, 0)


def check_card(device: torch.device) -> None:
    """Raises EngineRefused, saying what to do, when the engine cannot run on this device. More cards than one are not
    used, which is logged: layers are not split over them."""
    if device.type != "cuda":
        return
    if device.index not in (None, 0):
        raise EngineRefused(
            f"the exl2 engine runs on the first card that CUDA shows, not on {device}: choose one with "
            f"CUDA_VISIBLE_DEVICES={device.index}"
        )
    if not torch.cuda.is_available():
        raise EngineRefused("the exl2 engine needs an NVIDIA card, and CUDA finds none (try PREREAD_ENGINE=torch)")
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    if capability < LEAST_CAPABILITY:
        raise EngineRefused(f"{name} is of sm_{capability[0]}{capability[1]}, the exl2 engine needs sm_70 or newer")
    if find_spec("exllamav2") is None:
        raise EngineRefused("the exl2 engine needs exllamav2: run .venv/bin/pip install '.[gpu]' in Preread's folder")
    if (n := torch.cuda.device_count()) > 1:
        log.warning("the engine uses %s, the first of %d cards; CUDA_VISIBLE_DEVICES chooses another", name, n)
