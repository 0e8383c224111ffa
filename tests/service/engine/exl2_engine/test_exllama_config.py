"""The config that exllamav2 is given: what it must read there, and what it is kept from."""

import pytest
from transformers import AutoConfig

from service.engine.exl2_engine.exllama_loading import check_sizes, exllama_config
from service.engine.exl2_engine.model import UnsupportedModel
from service.engine.exl2_engine.spec import spec_of

SIZES = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": None,
    "pad_token_id": None,
}


def spec(kind, **changes):
    return spec_of(AutoConfig.for_model(kind, **(SIZES | changes)))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("smollm3", "Llama")],
)
def test_one_architecture_is_named_also_where_the_models_config_names_none(kind, architecture):
    config = exllama_config(spec(kind), {})
    assert config["architectures"] == [f"{architecture}ForCausalLM"]
    assert config["num_key_value_heads"] == 2
    assert "rope_scaling" not in config


def test_factors_are_applied_once_either_there_or_here():
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}
    config = exllama_config(spec("granite", logits_scaling=4.0, **factors), {})
    assert config["residual_multiplier"] == 0.5
    assert config["logits_scaling"] == 4.0
    assert not {"embedding_multiplier", "attention_multiplier", "scale_emb"} & set(config)


def test_biases_are_those_of_the_architecture():
    assert exllama_config(spec("llama", attention_bias=True), {})["attention_bias"] is True
    assert exllama_config(spec("qwen2"), {})["attention_bias"] is False  # exllamav2 knows those of Qwen2 by itself


def test_quantization_is_passed_on_and_what_exllamav2_cannot_read_is_refused():
    gptq = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    assert exllama_config(spec("llama"), {"quantization_config": gptq})["quantization_config"] == gptq
    for settings, named in (({"quant_method": "awq", "bits": 4}, "awq"), (gptq | {"bits": 8}, "8 bits")):
        with pytest.raises(UnsupportedModel, match=named):
            exllama_config(spec("llama"), {"quantization_config": settings})


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_sizes_that_exllamav2_would_pad_within_the_model_are_refused(name):
    with pytest.raises(UnsupportedModel, match=f"{name} 144"):
        check_sizes(spec("llama", head_dim=32, **{name: 144}))
