"""A two-layer random Llama as a Hugging Face directory, and a LoRA adapter for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(scope="session")
def make_model(tokenizer_json: bytes) -> Callable[..., Path]:
    """Writes a model directory; keyword arguments change its config."""

    def make(directory: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**(TINY | changes))).to(dtype)
        model.save_pretrained(directory)
        (directory / "tokenizer.json").write_bytes(tokenizer_json)
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(names))
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        return directory

    return make


@pytest.fixture(scope="session")
def source(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source") / "tiny llama")


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Writes a rank-4 adapter for q_proj of layer 0 and down_proj of layer 1."""

    def make(settings: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor | None] | None = None) -> Path:
        generator = torch.Generator().manual_seed(3)
        shapes = {
            "model.layers.0.self_attn.q_proj": (64, 128),
            "model.layers.1.mlp.down_proj": (96, 64),
        }
        stored: dict[str, torch.Tensor | None] = {}
        for module, (n_in, n_out) in shapes.items():
            stored[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, n_in, generator=generator)
            stored[f"base_model.model.{module}.lora_B.weight"] = torch.randn(n_out, 4, generator=generator)
        stored |= tensors or {}
        directory = tmp_path / "adapter"
        directory.mkdir(exist_ok=True)
        save_file({k: t for k, t in stored.items() if t is not None}, directory / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | (settings or {})
        (directory / "adapter_config.json").write_text(json.dumps(config))
        return directory

    return make
