"""Frequencies of the card's engine: those of transformers, bit for bit, and no setting changes a key."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cache_store.layout import KVType
from service.engine.exl2_engine.loading import Options, load_runner
from service.engine.exl2_engine.spec import spec_of

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("length", [1024, 100_000])
def test_frequencies_are_those_of_transformers_at_any_length(kind, rope, length):
    config = AutoConfig.for_model(
        kind,
        **SIZES,
        sliding_window=None,
        max_position_embeddings=length,
        rope_parameters={"rope_theta": 1e5} | ROPES[rope],
    )
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    spec = spec_of(config)
    assert spec.frequencies.dtype == torch.float32
    assert torch.equal(spec.frequencies, rotary.inv_freq)
    assert spec.rope_scaling == rotary.attention_scaling
    shorter = AutoConfig.for_model(
        kind,
        **SIZES,
        sliding_window=None,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 1e5} | ROPES[rope],
    )
    assert torch.equal(spec_of(shorter).frequencies, spec.frequencies)


def test_a_shorter_context_changes_no_key(tiny_dir, ids, read_document):
    tokens, records, identities = ids(700), [], []
    for max_context in (0, 1024):
        options = Options(KVType.K8V4, n_slots=1, tail_tokens=16, max_context=max_context, pool_nbytes=1 << 22)
        runner = load_runner(tiny_dir, options, "cpu")
        records.append([[bytes(record) for record in block] for block in read_document(runner, tokens)[1]])
        identities.append(runner.fingerprint)
    assert records[0] == records[1]
    assert identities[0] == identities[1]
