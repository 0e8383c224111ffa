"""The tables by which a GGUF is refused from its header, held against transformers and gguf."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_TYPES
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from service.engine.models.gguf import read_gguf
from service.engine.models.gguf_header import read_header
from service.engine.models.gguf_sizes import SERVED, Sizes, shapes_of
from service.engine.models.gguf_support import TOKENIZERS, UNREAD_TYPES, check_gguf
from service.engine.models.source import silent
from service.engine.models.support import SUPPORTED_TYPES
from tests.service.engine.models.damaged_gguf import N_TOKENS, whole
from tests.service.engine.models.test_gguf import write_model

SIZES = {arch: Sizes(arch, 64, 96, 2, 4, 2, 32 if arch == "qwen3" else 16, 50, 128, ()) for arch in SERVED}


@pytest.mark.parametrize("arch", SERVED)
def test_the_tensors_of_an_architecture_are_those_that_transformers_reads(arch: str) -> None:
    sizes = SIZES[arch]
    config = AutoConfig.for_model(
        arch, vocab_size=sizes.vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=sizes.head_dim, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names, weights = get_gguf_hf_weights_map(model, TensorProcessor(config.to_dict())), model.state_dict()
    read = {name: tuple(weights[of].shape) for name, of in names.items() if of in weights}
    assert read == shapes_of(sizes) | {"output.weight": (sizes.vocab, 64)}


def test_what_is_served_is_what_transformers_reads() -> None:
    assert set(SERVED) == set(GGUF_CONFIG_MAPPING) & set(SUPPORTED_TYPES) & set(gguf.MODEL_ARCH_NAMES.values())
    assert set(TOKENIZERS) == set(GGUF_TOKENIZER_TYPES)


def test_types_that_are_no_weights_are_those_that_gguf_does_not_dequantize() -> None:
    unread = []
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            unread.append(kind.name)
    assert set(unread) == set(UNREAD_TYPES)


@pytest.mark.parametrize("arch", SERVED)
def test_a_healthy_file_of_each_architecture_is_imported(tmp_path: Path, arch: str) -> None:
    width = 128 if arch == "qwen3" else 32
    sizes = Sizes(arch, 64, 64, 2, 2, 2, width, N_TOKENS, 128, ())
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes_of(sizes).items()}
    widths = ("rope.dimension_count", "attention.key_length", "attention.value_length")
    changes = {f"{arch}.{key}": whole(width) for key in widths} | {"tokenizer.ggml.padding_token_id": whole(0)}
    write_model(tmp_path / "m.gguf", arch=arch, changes=changes, **tensors)
    header = read_header(tmp_path / "m.gguf")
    check_gguf(header, kept=False)
    check_gguf(header, kept=True)
    source = read_gguf(tmp_path / "m.gguf", silent)
    assert source.config.model_type == arch
    assert all((tensor == 1).all() for name, tensor in source.tensors.items() if "lm_head" not in name)
