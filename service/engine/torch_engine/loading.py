"""Loads an imported model with Preread's attention in place of its own."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.engine.models.card import ModelCard, check_engine, load_card
from service.engine.models.light_transformers import AutoModelForCausalLM, logging, no_compiler
from service.engine.torch_engine.lean import LeanDecoder
from service.engine.torch_engine.linear import use_row_linears
from service.engine.torch_engine.plan import NAME

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`model` is called with `input_ids`, `position_ids` and a plan; it keeps no cache of its own. `lean` computes few
    rows faster, with the same weights."""

    model: Any
    card: ModelCard
    device: torch.device
    compute_dtype: torch.dtype
    lean: LeanDecoder | None = None


def load_model(model_dir: Path, compute_dtype: str, device: str) -> LoadedModel:
    """Read weights in `compute_dtype` (`float32`, `bfloat16`, on CUDA also `float16`).

    Raises ValueError for another dtype, and what `load_card` raises.
    """
    if compute_dtype not in DTYPES:
        raise ValueError(f"compute dtype {compute_dtype!r} is not one of {', '.join(DTYPES)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable_progress_bar()  # its bar would run through answers and logs
    card = load_card(model_dir)
    check_engine(card, "torch")
    dtype = DTYPES[compute_dtype]
    with no_compiler():
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=NAME, local_files_only=True
        )
    model.eval().requires_grad_(False)
    use_row_linears(model)
    model = model.to(device)
    return LoadedModel(model, card, torch.device(device), dtype, LeanDecoder.of(model))
