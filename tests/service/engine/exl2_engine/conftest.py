import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_dir(tokenizer_json, tmp_path_factory):
    """A random three-layer Llama with grouped heads, imported; its KV types are allowed without being measured."""
    from service.engine.models.card import KVGate
    from service.engine.models.importer import import_model

    source, models_dir = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.06,
    )
    LlamaForCausalLM(config).save_pretrained(source)
    (source / "tokenizer.json").write_bytes(tokenizer_json)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    gate = KVGate(0.0, 0.0, 1.0, True)
    gates = {"k8v8": gate, "k8v4": gate, "k4v4": gate}
    import_model(source, name="tiny", models_dir=models_dir, measure=lambda *_: gates, find_heads=lambda *_: None)
    return models_dir / "tiny"


@pytest.fixture(scope="session")
def make_runner(tiny_dir):
    """Makes a card runner on the CPU in FP32, each with a pool of its own."""
    from cache_store.layout import KVType
    from service.engine.exl2_engine.loading import Options, load_runner
    from service.engine.exl2_engine.pool import block_nbytes
    from service.engine.models.card import load_card

    def make(kv_type=KVType.FP16, n_blocks=24, **changes):
        layout = load_card(tiny_dir).layout(kv_type)
        options = {"n_slots": 6, "tail_tokens": 256, "chunk_tokens": 512} | changes
        nbytes = n_blocks * block_nbytes(layout)
        return load_runner(tiny_dir, Options(kv_type=kv_type, pool_nbytes=nbytes, **options), "cpu")

    return make


@pytest.fixture
def ids():
    """Random tokens by seed."""

    def make(n, seed=0):
        return torch.randint(3, 384, (n,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make


@pytest.fixture
def read_document():
    """Prefills a document chunk by chunk; gives it and its encoded blocks."""

    def run(runner, tokens):
        document, blocks = runner.new_document(len(tokens)), []
        for first in range(0, len(tokens), runner.limits.chunk_tokens):
            blocks += runner.prefill_chunk(document, tokens[first : first + runner.limits.chunk_tokens])
        return document, blocks

    return run
