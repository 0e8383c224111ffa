from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cache_store.layout import KVType
from service.engine.models.card import load_card
from service.engine.models.gate import continuation_logits, kl_stats
from service.engine.models.importer import import_model
from service.engine.models.support import SUPPORTED_TYPES
from service.engine.prompt import PromptTemplate
from service.engine.protocol import Rows
from service.engine.tokenizer import Tokenizer
from service.engine.torch_engine.loading import load_model
from service.engine.torch_engine.runner import TorchRunner

ROOT = Path(__file__).parents[4]


def test_an_import_measures_every_quantized_kv_type(source: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    card = import_model(source, name="tiny", models_dir=tmp_path, progress=lambda *p: stages.append(p))
    assert list(card.kv_types) == ["k8v8", "k8v4", "k4v4"]
    means = [gate.mean_kl for gate in card.kv_types.values()]
    assert 0 < means[0] < means[1] < means[2]
    assert load_card(tmp_path / "tiny") == card
    assert stages[-1] == ("measuring", 4, 4)


def random_model(directory: Path, kind: str, like: Path) -> Path:
    """A random model of a type, with the tokenizer and template of another."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        kind,
        vocab_size=384,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.05,
        sliding_window=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_bytes((like / name).read_bytes())
    return directory


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_the_engine_computes_every_supported_type_as_transformers_does(kind: str, source: Path, tmp_path: Path) -> None:
    directory = random_model(tmp_path / kind, kind, source)
    import_model(
        directory, name="model", models_dir=tmp_path / "models", measure=lambda *_: {}, find_heads=lambda *_: None
    )
    ids = torch.randint(3, 380, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    loaded = load_model(tmp_path / "models" / "model", "float32", "cpu")
    runner = TorchRunner(loaded, KVType.FP16, n_slots=1, tail_tokens=256, chunk_tokens=256)
    ours = continuation_logits(runner, ids, 500)
    with torch.inference_mode():
        stock = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([ids])).logits[0, 499:]
    stats = kl_stats(stock, ours)
    assert stats.mean < 1e-6
    assert stats.top1_agreement > 0.97


@pytest.mark.model
def test_the_demo_model_is_what_its_card_says(demo_model: Path) -> None:
    card = load_card(demo_model)
    assert (card.architecture, card.n_layers, card.n_kv_heads, card.max_context) == ("llama", 30, 3, 8192)
    assert card.eos_token_ids == [2]
    assert {kind for kind, gate in card.kv_types.items() if gate.allowed} >= {"k8v8", "k8v4"}
    assert card.kv_types["k8v8"].mean_kl < card.kv_types["k8v4"].mean_kl < card.kv_types["k4v4"].mean_kl


@pytest.mark.model
def test_the_demo_model_answers_from_the_document(demo_model: Path) -> None:
    tokenizer = Tokenizer.load(demo_model)
    card = load_card(demo_model)
    prompt = PromptTemplate(card.prompt, tokenizer)
    ids = prompt.document((ROOT / "examples" / "letter.txt").read_text(encoding="utf-8")).ids
    loaded = load_model(demo_model, "float32", "cpu")
    runner = TorchRunner(loaded, KVType.K8V4, n_slots=2, tail_tokens=256, chunk_tokens=512)
    document = runner.new_document(len(ids))
    runner.prefill_chunk(document, ids)

    questions = ["Who is the workshop foreman?", "What is the salary of the foreman?"]
    fed = [[ids[-1], *prompt.question(q)] for q in questions]
    slots, said = [runner.new_tail() for _ in questions], [list[int]() for _ in questions]
    while live := [i for i, answer in enumerate(said) if not {*answer} & {*card.eos_token_ids}]:
        rows = [Rows(slots[i], document, fed[i], not said[i], len(fed[i]) - 1) for i in live]
        for i, logits in zip(live, runner.forward(rows), strict=True):
            fed[i] = [int(logits[-1].argmax())]
            said[i] += fed[i]
    answers = [tokenizer.decode(ids) for ids in said]
    assert "Gregor Sillars" in answers[0]
    assert answers[1] == "The document does not say."
