"""Plans of GGUF files as llama.cpp serves them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cache_store.layout import KVType
from service.cli import main
from service.core.wishes import Kept
from service.engine.llama_engine import loading
from service.engine.llama_engine.ledger import check_fits, llama_ledger
from service.engine.llama_engine.loading import Options
from service.engine.models.errors import SourceRefused
from service.planning import placing
from service.planning.cards import CARDS, processor, with_memory
from service.planning.headers import read_model
from service.planning.ledgers import plan_ledger
from service.planning.model import Dimensions, ModelFacts, from_dimensions
from service.planning.placing import served_by_llama
from service.planning.plan import make_plan
from service.planning.request import Wanted, layout_of
from service.settings import Settings
from tests.service.engine.models.test_gguf import write_model
from tests.service.planning.test_headers import write_gguf

P40 = CARDS["p40"]
MACHINE = processor(16 << 30, 12 << 30, 20.0, 0.5)
BIG = from_dimensions(Dimensions(40, 4, 128, params_b=27, bits=4.9))
SERVED = Wanted(context=65_536, kv_type=KVType.K8V8, by_llama=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A model of a few thousand parameters with a head of its own."""
    write_model(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def made(model: ModelFacts, wanted: Wanted = SERVED, card: Any = P40) -> Any:
    return make_plan(model, card, wanted)[0]


def test_a_27b_file_of_five_bits_is_planned_for_a_p40() -> None:
    plan = made(BIG)
    assert plan.fits
    assert (plan.card["engine"], plan.card["kernels"]) == ("llamacpp", "llama.cpp")
    assert plan.bounds[0].tok_s == pytest.approx(346e9 / (27e9 * 4.9 / 8), rel=1e-3)
    assert [tier.tier for tier in plan.restore] == ["disk", "redis", "object"]  # nothing is copied to host memory
    assert any(f"PREREAD_RESIDENT_BYTES={65_536 * 43_520}" in note for note in plan.notes)
    assert any("never run on a card" in note for note in plan.notes)
    assert plan.conversion is None


def test_a_file_that_is_too_large_is_told_which_bits_would_fit() -> None:
    plan = made(from_dimensions(Dimensions(40, 4, 128, params_b=27, bits=16)), replace(SERVED, kv_type=KVType.K8V4))
    assert not plan.fits
    assert "does not fit the card" in plan.problems[0]
    (best,) = plan.settings
    assert (best.bits, best.kv_type, best.retention) == (4.9, "k8v8", "full")
    assert best.free_nbytes > 0
    assert any("Q4_K_M 4.9" in note for note in plan.notes)
    assert any("FA_ALL_QUANTS" in note for note in plan.notes)


def test_what_is_said_to_be_missing_is_what_is_missing() -> None:
    wanted = replace(SERVED, context=200_000)
    plan = made(BIG, wanted)
    (missing,) = re.findall(r"([\d.]+) GiB are missing", plan.problems[0])
    assert not any("PREREAD_RESIDENT_BYTES" in note for note in plan.notes)
    for more, fits in ((-0.1, False), (0.1, True)):
        nbytes = P40.memory_nbytes + int((float(missing) + more) * 2**30)
        assert made(BIG, wanted, with_memory(P40, nbytes, nbytes)).fits == fits


def test_bits_that_are_asked_for_keep_what_a_file_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only plain weights would lack is no reason against a GGUF, in other bits either."""
    facts = replace(read_model(file), kept=True, problems=("its RoPE has factors",))
    monkeypatch.setattr("service.planning.headers.read_model", lambda path: facts)
    said = CliRunner().invoke(main, ["plan", str(file), "--bits", "4.9", "--card", "t4", "--context", "64", "--json"])
    plan = json.loads(said.output)
    assert (plan["fits"], plan["card"]["engine"], plan["model"]["bits_per_weight"]) == (True, "llamacpp", 4.9)


def test_a_build_without_a_card_is_planned_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for backends, offload, takes in (
        (None, "auto", True),
        ([], "auto", False),
        (["cuda"], "auto", True),
        (None, "none", False),
    ):
        monkeypatch.setattr(placing, "gpu_backends", lambda found=backends: found)
        assert placing.llama_takes_cards(Settings(offload=offload)) == takes


def test_nothing_fits_a_document_that_is_longer_than_the_models_context() -> None:
    short = replace(BIG, max_context=8192)
    assert made(short).settings == []
    windowed = made(short, replace(SERVED, by_llama=False), CARDS["h200"]).settings
    assert windowed
    assert "full" not in {setting.retention for setting in windowed}
    assert made(replace(short, index_heads=False), replace(SERVED, by_llama=False), CARDS["h200"]).settings == []


def test_bits_are_those_of_the_weights_as_they_are_served(file: Path) -> None:
    model, wanted = read_model(file), replace(SERVED, context=64, by_llama=False)
    assert made(model, wanted, CARDS["t4"]).settings[0].bits == 16
    assert made(model, wanted, MACHINE).settings[0].bits == 32
    assert made(replace(model, kind="plain", bits=32.0), wanted, CARDS["t4"]).settings[0].bits == 16


def test_as_many_tokens_are_said_to_fit_as_do() -> None:
    wanted = replace(SERVED, context=1 << 20)
    for card in (P40, MACHINE):
        model = from_dimensions(Dimensions(40, 4, 128, params_b=8, bits=4.9, max_context=1 << 20))
        fitting = plan_ledger(model, card, wanted).pool_tokens
        assert 0 < fitting < 1 << 20
        assert made(model, replace(wanted, context=fitting), card).fits
        assert not made(model, replace(wanted, context=fitting + 256), card).fits


def test_on_a_processor_it_is_the_plan_that_the_engine_makes(file: Path) -> None:
    model, wanted = read_model(file), replace(SERVED, context=2048, users=2)
    plan, ledger = make_plan(model, MACHINE, wanted)
    layout = layout_of(model.shape, KVType.K8V8)
    options = Options(KVType.K8V8, wanted.n_slots, wanted.tail_tokens, 2048 * layout.bytes_per_token)
    batch = loading.N_ROWS, loading.N_OUTPUTS, loading.n_sequences(options)
    sizes = loading.n_cells(layout, options)
    own = llama_ledger(model.stored_nbytes, model.shape, layout, sizes, batch, ledger.memory, model.max_context)
    assert ledger == own
    check_fits(own)
    assert plan.kv_bytes_per_token.reads == layout.bytes_per_token
    assert 0 < plan.step_weights_nbytes <= model.stored_nbytes


def test_an_input_embedding_is_neither_read_by_steps_nor_on_the_card(tmp_path: Path) -> None:
    model = read_model(write_gguf(tmp_path / "llama-8b.gguf"))
    plan = made(model, replace(SERVED, context=2048), CARDS["v100-32"])
    table = model.shape.vocab * model.shape.hidden / model.n_parameters
    assert sum(model.footprint.head)
    assert plan.weights_nbytes == plan.step_weights_nbytes == pytest.approx(model.stored_nbytes * (1 - table), rel=1e-3)
    lines = {line["name"]: line["nbytes"] for line in plan.ledger["lines"]}
    assert lines["a matrix in FP16, for its products"] == 2 * model.shape.hidden * model.shape.vocab  # Volta's alone
    assert "as it is" in plan.model["weights"]


@pytest.mark.parametrize(
    ("model", "wanted", "said"),
    [
        (BIG, replace(SERVED, kept=Kept(16, 1024, 8192)), "keeps documents whole"),
        (BIG, replace(SERVED, draft=BIG), "guesses no tokens"),
        (BIG, replace(SERVED, context=256, documents=33), "at most 32 documents"),
        (replace(BIG, kind="exl2", label="exl2-4.0bpw"), SERVED, "does not read exl2-4.0bpw weights"),
        (replace(BIG, kind="gptq", label="gptq-4bit"), SERVED, "take a GGUF of the model"),
        (replace(BIG, kind="plain"), SERVED, "llama.cpp reads GGUF files alone"),
        (replace(BIG, max_context=8192), SERVED, "65,536 is too long for it"),
        (replace(BIG, problems=("models of type mamba are not served",)), SERVED, "mamba"),
        (replace(BIG, allowed_kv=("k8v4",), kind="gguf"), SERVED, "KV type k8v8 was not measured"),
    ],
)
def test_what_llama_cpp_does_not_serve_is_refused(model: ModelFacts, wanted: Wanted, said: str) -> None:
    assert any(said in problem for problem in made(model, wanted).problems)


def test_what_only_the_exl2_engine_lacks_is_no_problem() -> None:
    assert made(replace(BIG, card_problems=("not served on a card",))).fits


def test_whose_plan_it_is_follows_from_setting_model_and_card() -> None:
    other, llama = Settings(engine="exl2"), Settings(engine="llamacpp")
    assert served_by_llama(llama, BIG, CARDS["h200"])
    assert served_by_llama(other, BIG, P40)
    assert served_by_llama(other, replace(BIG, kept=True), CARDS["h200"])
    assert not served_by_llama(other, BIG, CARDS["v100-16"])
    assert not served_by_llama(other, BIG, MACHINE)


def test_a_model_that_was_imported_for_llama_cpp_is_planned_so(file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    file.rename(kept / "model.gguf")
    (kept / "config.json").write_text("{}")
    model = read_model(kept)
    assert (model.name, model.kind, model.kept) == ("kept", "gguf", True)
    said = CliRunner().invoke(main, ["plan", str(kept), "--card", "t4", "--context", "64", "--json"], env={})
    assert json.loads(said.output)["card"]["engine"] == "llamacpp"


def test_the_command_plans_a_file_as_it_lies_when_asked(file: Path) -> None:
    def planned(*more: str) -> dict[str, Any]:
        arguments = ["plan", str(file), "--card", "t4", "--context", "64", "--json", *more]
        return json.loads(CliRunner().invoke(main, arguments, env={}).output)

    asked, usual = planned("--engine", "llamacpp"), planned()
    assert (asked["card"]["engine"], usual["card"]["engine"]) == ("llamacpp", "exl2")
    assert asked["model"]["weights"].endswith("as it is")
    assert any("--engine llamacpp" in note for note in usual["notes"])
    assert not any("an import turns" in note for note in asked["notes"])


def test_what_is_there_and_no_gguf_is_told_from_what_is_not_there(file: Path, tmp_path: Path) -> None:
    upper = file.rename(tmp_path / "TINY.GGUF")
    assert read_model(upper).kind == "gguf"
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(SourceRefused, match="neither a GGUF file"):
        read_model(tmp_path / "notes.md")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(SourceRefused, match=r"config.json is not a file"):
        read_model(tmp_path)
