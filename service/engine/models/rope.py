"""Identity of a model's rotary position embedding, as transformers computes it from the config."""

import hashlib
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def rope_digest(config: Any) -> str:
    """32 hex digits over the float32 bytes of inv_freq and the attention scaling. Loads no weights."""
    with torch.device("meta"):
        rotary_type = type(AutoModelForCausalLM.from_config(config).model.rotary_emb)
    rotary = rotary_type(config=config)
    frequencies = rotary.inv_freq.detach().to("cpu", torch.float32).numpy().astype("<f4").tobytes()
    scaling = struct.pack("<d", float(rotary.attention_scaling))
    return hashlib.blake2b(frequencies + scaling, digest_size=16).hexdigest()


def stored_rope_digest(model_dir: Path) -> str:
    """`rope_digest` of a model directory."""
    return rope_digest(AutoConfig.from_pretrained(str(model_dir), local_files_only=True))
