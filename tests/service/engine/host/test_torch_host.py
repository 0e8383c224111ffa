"""The host over the torch engine and a tiny random Llama: what a runner without a model cannot show."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from service.engine.digests import digest_of
from service.engine.factory import EngineConfig, open_host
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Sampling,
    TurnRef,
)
from service.engine.models.card import KVGate
from service.engine.models.importer import import_model

DOC = DocumentRef("own", "doc")
TOKENS = [3 + 7 * i % 350 for i in range(1300)]
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer_json):
    """A directory of models with one that passed the gate for K8V4."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(11)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(root / "source")
    (root / "source" / "tokenizer.json").write_bytes(tokenizer_json)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (root / "source" / "tokenizer_config.json").write_text(json.dumps(names))
    passed = {"k8v4": KVGate(mean_kl=0.0, p99_kl=0.0, top1_agreement=1.0, allowed=True)}
    import_model(root / "source", name="tiny", models_dir=root, measure=lambda *_: passed, find_heads=lambda *_: None)
    return root


@pytest.fixture
def start(models, tmp_path):
    hosts = []

    def make(kv_type: str, compute_dtype: str, **more):
        config = EngineConfig(
            store_dir=str(tmp_path / "store"), model_dir=str(models / "tiny"), kv_type=kv_type,
            compute_dtype=compute_dtype, free_floor_nbytes=0, threads=1, tail_tokens=256,
            **more,
        )  # fmt: skip
        hosts.append(open_host(config))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def build(host) -> BuildDone:
    events: list = []
    host.build(BuildRequest("b", DOC, TOKENS), events.append).result(60)
    assert isinstance(events[-1], BuildDone), events[-1]
    return events[-1]


def ask(host, prompt, turns=(), kv_id="", session="s") -> tuple[AnswerStarted, AnswerDone]:
    events: list = []
    request = AnswerRequest("a", session, DOC, digest_of(TOKENS), len(TOKENS), list(turns), prompt, Sampling(6), kv_id)
    host.answer(request, events.append).result(60)
    assert isinstance(events[0], AnswerStarted), events[0]
    assert isinstance(events[-1], AnswerDone), events[-1]
    return events[0], events[-1]


@pytest.mark.parametrize(("kv_type", "dtype"), [("k8v4", "float32"), ("fp16", "float32"), ("k8v4", "bfloat16")])
def test_answers_and_follow_ups_are_the_same_after_a_restart(start, kv_type, dtype):
    host = start(kv_type, dtype)
    assert build(host).prefilled_tokens == len(TOKENS)
    _, first = ask(host, [5, 6, 7], kv_id="k1")
    turns = [TurnRef("k1", first.token_ids)]
    _, second = ask(host, [*first.pending_ids, 8, 9], turns)
    host.close()
    host = start(kv_type, dtype)
    started, again = ask(host, [5, 6, 7], session="x")
    assert (started.source, started.reused_tokens, started.prefilled_tokens) == ("disk", len(TOKENS), 3)
    assert again.token_ids == first.token_ids
    assert host.stats().prefilled_tokens_total == 3
    started, follow_up = ask(host, [*first.pending_ids, 8, 9], turns, session="y")
    assert started.restored_tokens == len(first.token_ids)
    assert follow_up.token_ids == second.token_ids


def test_a_follow_up_is_the_first_question_after_a_restart(start):
    host = start("k8v4", "float32")
    build(host)
    _, first = ask(host, [5, 6, 7], kv_id="k1")
    turns = [TurnRef("k1", first.token_ids)]
    _, second = ask(host, [*first.pending_ids, 8, 9], turns)
    host.close()
    started, follow_up = ask(start("k8v4", "float32"), [*first.pending_ids, 8, 9], turns)
    assert started.reused_tokens == len(TOKENS) + len(first.token_ids)
    assert follow_up.token_ids == second.token_ids


@pytest.mark.parametrize("speculation", ["auto", "on", "off"])
def test_speculation_is_on_unless_it_is_off(start, speculation):
    host = start("fp16", "float32", speculation=speculation)
    build(host)
    _, done = ask(host, TOKENS[:40])
    assert (host.stats().lookup_nbytes > 0) == (speculation != "off")
    assert done.drafted_tokens == 0 or speculation != "off"
    assert (host._context.scheduler.planner is None) == (speculation == "off")


def test_check_decodes_a_token(start):
    assert start("fp16", "float32").check() > 0


def test_a_kv_type_that_was_not_measured_is_refused(start):
    with pytest.raises(Exception, match="k4v4"):
        start("k4v4", "float32")
