"""A random three-layer Llama with the demo model's head layout, imported, and stock transformers beside it.

Its KV types are allowed without being measured.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cache_store.layout import KVType
from service.engine.models.card import KVGate
from service.engine.models.importer import import_model
from service.engine.torch_engine.runner import TorchRunner

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHUNK = 512


@pytest.fixture(scope="session")
def hf_dir(tokenizer_json, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=576,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.06,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes(tokenizer_json)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def model_dir(hf_dir, tmp_path_factory):
    models_dir, gate = tmp_path_factory.mktemp("models"), KVGate(0.0, 0.0, 1.0, True)
    gates = {"k8v8": gate, "k8v4": gate, "k4v4": gate}
    import_model(hf_dir, name="tiny", models_dir=models_dir, measure=lambda *_: gates, find_heads=lambda *_: None)
    return models_dir / "tiny"


@pytest.fixture(scope="session")
def stock(hf_dir):
    return AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def eager(hf_dir):
    """Stock transformers whose attention takes any mask and gives its probabilities."""
    return AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def load_runner(model_dir):
    """Loads a runner of a KV type; the same arguments give the same one."""
    loaded = {}

    def load(kv_type=KVType.FP16, compute_dtype="float32", **options):
        key = (kv_type, compute_dtype, *sorted(options.items()))
        if key not in loaded:
            options = {"n_slots": 6, "tail_tokens": 256, "chunk_tokens": CHUNK} | options
            loaded[key] = TorchRunner.load(model_dir, kv_type=kv_type, compute_dtype=compute_dtype, **options)
        return loaded[key]

    return load


@pytest.fixture
def token_ids():
    """Random tokens by seed."""

    def make(n, seed=0):
        return torch.randint(3, 384, (n,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make


@pytest.fixture
def prefill():
    """Prefills a document chunk by chunk; gives it and its encoded blocks."""

    def run(runner, tokens):
        document = runner.new_document(len(tokens))
        blocks = []
        for first in range(0, len(tokens), runner.limits.chunk_tokens):
            blocks += runner.prefill_chunk(document, tokens[first : first + runner.limits.chunk_tokens])
        return document, blocks

    return run
