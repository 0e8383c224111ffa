"""Loading a model with exllamav2: its matrices and modules, none of its attention, caches, positions or generators.

exllamav2 reads a directory of its own: links to the model's tensors, and a `config.json` written here from the spec.
So one reading of the model's config (ours) decides what is computed, and configs that exllamav2 does not understand, or
reads otherwise than transformers, cannot mislead it.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from service.engine.exl2_engine.model import UnsupportedModel
from service.engine.exl2_engine.spec import ModelSpec
from service.engine.models.configs import read_config

ROPE_ROWS = 256
"""Length of exllamav2's own RoPE tables, which nothing here uses."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "LlamaForCausalLM",
    "granite": "GraniteForCausalLM",
}


def load_modules(model_dir: Path, spec: ModelSpec, max_rows: int, max_dq_elements: int) -> Any:
    """exllamav2's model on the first card, for forwards of at most `max_rows` rows through its MLP modules.

    `max_dq_elements`: quantized weights that are turned to FP16 at once for many rows; matrices beyond it take its slow
    way. Raises UnsupportedModel when a projection has no weights that exllamav2 can read.
    """
    from exllamav2 import ExLlamaV2, ExLlamaV2Config  # pyright: ignore[reportMissingImports]

    check_sizes(spec)
    stream = torch.cuda.current_stream()
    with model_view(model_dir, spec) as directory:
        config = ExLlamaV2Config(str(directory))
        config.max_batch_size = 1
        config.max_input_len = max_rows
        config.max_seq_len = ROPE_ROWS
        config.max_dq_size = max_dq_elements
        config.no_graphs = True
        config.no_flash_attn = True
        config.no_xformers = True
        model = ExLlamaV2(config)
        try:
            model.load()
        finally:
            torch.cuda.set_stream(stream)  # loading may leave exllamav2's own stream as the current one
    torch.cuda.synchronize()
    return model


def check_sizes(spec: ModelSpec) -> None:
    """Raises UnsupportedModel for widths that exllamav2 would pad, but only on one side of a product."""
    for name in ("hidden_size", "intermediate_size"):
        if getattr(spec, name) % 32:
            raise UnsupportedModel(f"its {name} {getattr(spec, name)} is not a multiple of 32, as exllamav2 needs")


@contextmanager
def model_view(model_dir: Path, spec: ModelSpec) -> Iterator[Path]:
    """A directory with the model's tensors and the config that exllamav2 shall see."""
    stored = read_config(model_dir)
    with tempfile.TemporaryDirectory(prefix="preread-") as name:
        directory = Path(name)
        for path in sorted(model_dir.glob("*.safetensors")):
            (directory / path.name).symlink_to(path.resolve())
        (directory / "config.json").write_text(json.dumps(exllama_config(spec, stored)), "utf-8")
        yield directory


def exllama_config(spec: ModelSpec, stored: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` for exllamav2. `stored` is the model's own, of which only the quantization is taken.

    Granite's factors on embeddings and scores, all of RoPE and the norm of queries and keys are applied by this engine,
    the factors on residuals and logits by exllamav2. Raises UnsupportedModel for weights it cannot read.
    """
    quantization = stored.get("quantization_config")
    if quantization:
        _check_quantization(quantization)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[spec.model_type]],
        "attention_bias": spec.bias_qkv and spec.bias_o,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "logits_scaling": 1 / spec.logit_factor,
        "max_position_embeddings": ROPE_ROWS,
        "mlp_bias": spec.bias_mlp,
        "num_attention_heads": spec.n_heads,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_heads,
        "residual_multiplier": spec.residual_factor,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_head,
        "vocab_size": spec.vocab_size,
    }
    return config | ({"quantization_config": quantization} if quantization else {})


def _check_quantization(quantization: dict[str, Any]) -> None:
    method, bits = quantization.get("quant_method"), quantization.get("bits")
    if method not in ("exl2", "gptq"):
        raise UnsupportedModel(f"its weights are quantized as {method}, this engine reads exl2, gptq and plain ones")
    if method == "gptq" and bits != 4:
        raise UnsupportedModel(f"its GPTQ weights have {bits} bits, exllamav2 reads those of 4")
