"""Which models may guess for which: tokens are compared, whatever form a tokenizer's file has."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache_store.layout import KVType
from service.engine.factory import EngineConfig, open_host
from service.engine.models.card import KVGate, ModelCard, ModelDigests, save_card
from service.engine.models.draft import check_draft, draft_kv_type, first_difference
from service.engine.models.errors import DraftRefused, EngineRefused, ModelDamaged, ModelNotFound
from service.engine.prompt import PromptParts

CARD = ModelCard(
    format_version=1, name="big", source="", architecture="llama", n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32,
    max_context=512, vocab_size=8, n_parameters=1000, dtype="float32", eos_token_ids=[2], quantization="none",
    digests=ModelDigests(weights="w", config="c", tokenizer="t", template="p", rope="r"),
    prompt=PromptParts("system", "end", "user", "assistant", "end"), files={},
)  # fmt: skip
VOCAB = {"<s>": 0, "a": 1, "b": 2, "ab": 3}
TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": VOCAB, "merges": ["a b"]},
    "added_tokens": [{"id": 0, "content": "<s>", "special": True}, {"id": 4, "content": "<end>", "special": True}],
}


@dataclass
class Models:
    folder: Path

    def make(self, name: str, tokenizer: Any = TOKENIZER, **card: Any) -> Path:
        directory = self.folder / name
        directory.mkdir()
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        digests = msgspec.structs.replace(CARD.digests, tokenizer=name)
        save_card(msgspec.structs.replace(CARD, name=name, digests=digests, **card), directory)
        return directory


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def with_model(**changes: Any) -> dict[str, Any]:
    return TOKENIZER | {"model": TOKENIZER["model"] | changes}


def test_the_same_tokens_written_otherwise_are_the_same(models: Models) -> None:
    pairs = with_model(merges=[["a", "b"]], vocab=dict(reversed(VOCAB.items())))
    listed = with_model(type="Unigram", vocab=[["<s>", 0.0], ["a", -1.0], ["b", -2.0], ["ab", -3.0]])
    big = models.make("big")
    assert first_difference(big, models.make("pairs", pairs)) == ""
    assert first_difference(big, models.make("listed", listed)) == ""


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (with_model(vocab=VOCAB | {"b": 3, "ab": 2}), "token 2 is 'b' in the model, and 'ab' in the draft model"),
        (with_model(vocab=VOCAB | {"more": 5}), "token 5 is missing in the model, and 'more' in the draft model"),
        (with_model(merges=["b a"]), "merge 0 is 'a b' in the model, and 'b a' in the draft model"),
        (with_model(merges=[]), "merge 0 is 'a b' in the model, and missing in the draft model"),
        (
            TOKENIZER | {"added_tokens": [{"id": 4, "content": "<stop>", "special": True}]},
            "token 4 is '<end>' in the model, and '<stop>' in the draft model",
        ),
        (TOKENIZER | {"added_tokens": []}, "token 4 is '<end>' in the model, and missing in the draft model"),
    ],
)
def test_the_first_token_that_differs_is_named(models: Models, tokenizer: Any, expected: str) -> None:
    big, small = models.make("big"), models.make("small", tokenizer)
    assert first_difference(big, small) == expected
    with pytest.raises(DraftRefused) as refused:
        check_draft(big, small, "torch")
    assert "small has other tokens than big: " + expected in str(refused.value)
    assert "PREREAD_DRAFT_MODEL" in str(refused.value)


def test_one_of_the_same_tokens_is_taken(models: Models) -> None:
    assert check_draft(models.make("big"), models.make("small"), "exl2").name == "small"


def test_what_cannot_guess_is_refused(models: Models) -> None:
    big = models.make("big")
    for engine in ("fake", "llamacpp"):
        with pytest.raises(EngineRefused, match=f"the {engine} engine guesses no tokens: unset PREREAD_DRAFT_MODEL"):
            check_draft(big, big, engine)
    with pytest.raises(EngineRefused, match=r"the draft model .*needs?|the draft model .*quantized"):
        check_draft(big, models.make("packed", quantization="exl2-4.0bpw"), "torch")
    with pytest.raises(ModelNotFound, match="the draft model"):
        check_draft(big, models.folder / "nothing", "torch")
    broken = models.make("broken")
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelDamaged, match=r"tokenizer\.json: model is None, and has to be an object"):
        check_draft(big, broken, "torch")


def test_the_engine_refuses_before_it_loads(models: Models, tmp_path: Path) -> None:
    config = EngineConfig(store_dir=str(tmp_path / "store"), engine="fake", draft_model_dir=str(models.make("small")))
    with pytest.raises(EngineRefused, match="the fake engine guesses no tokens"):
        open_host(config)
    other = models.make("other", with_model(merges=[]))
    config = EngineConfig(
        store_dir=str(tmp_path / "store"), model_dir=str(models.make("big")), draft_model_dir=str(other)
    )
    with pytest.raises(DraftRefused, match="merge 0"):
        open_host(config)


def test_a_kv_type_that_was_not_measured_or_is_refused_makes_it_fp16() -> None:
    gate = KVGate(mean_kl=0.0, p99_kl=0.0, top1_agreement=1.0, allowed=True)
    card = msgspec.structs.replace(CARD, kv_types={"k8v4": gate, "k4v4": msgspec.structs.replace(gate, allowed=False)})
    kinds = [draft_kv_type(card, kind) for kind in (KVType.K8V4, KVType.K4V4, KVType.K8V8, KVType.FP16)]
    assert kinds == [KVType.K8V4, KVType.FP16, KVType.FP16, KVType.FP16]
