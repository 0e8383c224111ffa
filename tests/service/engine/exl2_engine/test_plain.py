"""The plain decoder against transformers, whole models of every type that the card engine computes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.plain import PlainModel
from service.engine.exl2_engine.pool import BlockPool
from service.engine.exl2_engine.portable import PortableBackend
from service.engine.exl2_engine.spec import spec_of
from service.engine.models.errors import ArchitectureRefused
from service.engine.models.support import CARD_TYPES

SIZES = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}


def config_of(kind, **changes):
    return AutoConfig.for_model(kind, **(SIZES | changes))


def logits_of(model, ids):
    """A whole text as one document chunk, its logits too."""
    layout = KVLayout(model.n_layers, model.n_kv_heads, model.head_dim, KVType.FP16)
    backend = PortableBackend(layout, "cpu")
    pool, blocks = BlockPool(layout, 2, model.device), torch.tensor([0, 1], dtype=torch.int32)
    x, positions = model.embed(ids), torch.arange(len(ids), dtype=torch.int32)
    for layer in range(model.n_layers):
        q, k, v = model.qkv(layer, x)
        q, k = (backend.rope_and_rotate(y, positions, *model.rope(layer)) for y in (q, k))
        out = backend.prefill(q, k, v, pool.layers[layer], blocks, 0, model.scale)
        x = model.mlp(layer, model.attention_out(layer, out, x))
    return model.head(x)


CASES = [(kind, {}) for kind in CARD_TYPES if kind != "granite"] + [
    ("granite", GRANITE),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": YARN, "head_dim": 64}),
    ("qwen3", {"attention_bias": True, "head_dim": 32}),
    ("qwen2", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=str)
def test_it_computes_what_transformers_computes(kind, changes):
    torch.manual_seed(0)
    config = config_of(kind, **changes)
    stock = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in stock.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    ids = torch.randint(0, 200, (300,))
    with torch.inference_mode():
        model = PlainModel(spec_of(config), stock.state_dict().__getitem__, torch.float32, "cpu")
        expected, got = stock(ids[None]).logits[0], logits_of(model, ids)
    kl = (expected.log_softmax(-1).exp() * (expected.log_softmax(-1) - got.log_softmax(-1))).sum(-1)
    assert kl.max() < 1e-6
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("olmo2", {}, "olmo2"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("mistral", {"sliding_window": 64}, "sliding window of 64"),
        ("gemma2", {}, "gemma2"),
        ("cohere", {}, "cohere"),
        ("mixtral", {}, "mixtral"),
    ],
)
def test_what_it_would_compute_wrongly_is_refused_by_name(kind, changes, message):
    with pytest.raises(ArchitectureRefused, match=message):
        spec_of(config_of(kind, **changes))


def test_how_weights_are_stored_changes_nothing_of_what_is_computed():
    quantized = config_of("llama", quantization_config={"quant_method": "exl2", "bits": 4.0})
    assert spec_of(quantized).frequencies.tolist() == spec_of(config_of("llama")).frequencies.tolist()
    assert quantized.quantization_config
