"""A model's rotary position embedding, as transformers computes it from the config: every engine uses this one."""

import hashlib
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from service.engine.models.auto_config import stored_config
from service.engine.models.light_transformers import AutoModelForCausalLM, no_compiler


def inv_freq(config: Any) -> tuple[Tensor, float]:
    """Frequencies ``[head_dim / 2]`` (float32, on the CPU) and the factor on sines and cosines.

    They are bit for bit those of the transformers model. Of the types that are served none depends on how long a
    text is or may be: see `support.SUPPORTED_ROPE`. Loads no weights.
    """
    with no_compiler(), torch.device("meta"):
        rotary_type = type(AutoModelForCausalLM.from_config(config).model.rotary_emb)
    rotary = rotary_type(config=config)
    return rotary.inv_freq.detach().to("cpu", torch.float32), float(rotary.attention_scaling)


def stored_inv_freq(model_dir: Path) -> tuple[Tensor, float]:
    """`inv_freq` of a model directory."""
    return inv_freq(stored_config(model_dir))


def rope_digest(config: Any) -> str:
    """32 hex digits over the float32 bytes of inv_freq and the attention scaling. Loads no weights."""
    frequencies, scaling = inv_freq(config)
    data = frequencies.numpy().astype("<f4").tobytes() + struct.pack("<d", scaling)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def stored_rope_digest(model_dir: Path) -> str:
    """`rope_digest` of a model directory."""
    return rope_digest(stored_config(model_dir))
