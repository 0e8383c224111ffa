"""`convert_model` around a converter that only pretends."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from service.engine.models.card import ModelCard
from service.engine.models.convert import needs, work
from service.engine.models.convert.convert import Wanted, convert_model, default_name
from service.engine.models.convert.record import read_conversion
from service.engine.models.convert.request import Rows
from service.engine.models.errors import (
    ArchitectureRefused,
    EngineRefused,
    ModelDamaged,
    NameTaken,
    SourceRefused,
    TokenizerRefused,
)
from service.engine.models.importer import import_model
from tests.service.engine.models.convert.conftest import PretendedConverter

ROWS = Rows(4, 64, 2)
Convert = Callable[..., ModelCard]


@pytest.fixture
def convert(source: Path, tmp_path: Path, converter: PretendedConverter) -> Convert:
    def run(path: Path = source, *, tools: dict[str, Any] | None = None, **changes: Any) -> ModelCard:
        replace = changes.pop("replace", False)
        wanted = Wanted(**{"bits": 4.25, "rows": ROWS} | changes)
        return convert_model(
            path, wanted, name="small", models_dir=tmp_path / "models", work_dir=tmp_path / "work", replace=replace,
            tools=converter.tools(**tools or {}),
        )  # fmt: skip

    return run


def test_what_comes_out_is_a_model_with_its_record(convert: Convert, source: Path, tmp_path: Path) -> None:
    card = convert()
    path = tmp_path / "models" / "small"
    made = read_conversion(path)
    assert card.quantization == "exl2-4.25bpw"
    assert card.source == "tiny llama in 4.25 bits"
    assert made is not None
    assert (made.bits, made.head_bits, made.calibrated_on, made.rows) == (4.25, 6, "the bundled mix", 4)
    assert made.weights == card.digests.weights
    assert 0 < made.likeness.mean_kl < 0.01
    assert made.likeness.source_perplexity != made.likeness.perplexity
    config = json.loads((path / "config.json").read_bytes())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["calibration"] == {"rows": 4, "length": 64, "dataset": made.calibration}
    assert (path / "output.safetensors").stat().st_mode & 0o044 == 0o044, "other users may read a model"
    assert not (tmp_path / "work").exists()
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == ["small"]
    assert (source / "model.safetensors").is_file()


def test_an_interrupted_conversion_is_gone_on_with(
    convert: Convert, converter: PretendedConverter, tmp_path: Path
) -> None:
    converter.breaks = 2
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            convert()
    assert not (tmp_path / "models" / "small").exists()
    convert()
    assert converter.runs == ["begun", "gone on", "gone on"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"bits": 5.0}, "bits"), ({"head_bits": 8}, "head_bits"), ({"own_texts": ["word " * 900]}, "calibration")],
)
def test_another_conversion_does_not_take_its_place(
    convert: Convert, converter: PretendedConverter, changes: dict[str, Any], named: str
) -> None:
    converter.breaks = 1
    with pytest.raises(KeyboardInterrupt):
        convert()
    with pytest.raises(SourceRefused, match=rf"4\.25 bits, which differs in .*{named}.*--work"):
        convert(**changes)
    assert converter.runs == ["begun"]


def test_other_weights_of_the_same_name_begin_nothing(
    convert: Convert, converter: PretendedConverter, source: Path, tmp_path: Path
) -> None:
    converter.breaks = 1
    own = shutil.copytree(source, tmp_path / "own")
    with pytest.raises(KeyboardInterrupt):
        convert(own)
    (own / "model.safetensors").touch()
    with pytest.raises(SourceRefused, match="differs in weights"):
        convert(own)


def test_a_job_that_was_cut_while_it_was_written_begins_anew(
    convert: Convert, converter: PretendedConverter, tmp_path: Path
) -> None:
    converter.breaks = 1
    with pytest.raises(KeyboardInterrupt):
        convert()
    work.save_job(tmp_path / "work", {"progress": "quantize", "invalid": True})
    convert()
    assert converter.runs == ["begun", "begun"]


def test_weights_that_predict_otherwise_are_published_only_when_asked_for(
    convert: Convert, converter: PretendedConverter, tmp_path: Path
) -> None:
    converter.drift = 3.0
    with pytest.raises(SourceRefused, match=r"mean KL of .* above the limit of 0\.5: give more bits"):
        convert()
    assert not (tmp_path / "models" / "small").exists()
    convert(most_kl=50.0)
    assert converter.runs == ["begun"], "what was converted is not converted again"
    made = read_conversion(tmp_path / "models" / "small")
    assert made is not None
    assert made.likeness.mean_kl > 0.5


def test_predictions_that_are_no_numbers_publish_nothing(convert: Convert, tmp_path: Path) -> None:
    def predict(directory: Path, card: ModelCard, texts: Any) -> list[torch.Tensor]:
        return [torch.full((len(ids) - 15, card.vocab_size), torch.nan) for ids in texts]

    with pytest.raises(SourceRefused, match="no numbers"):
        convert(tools={"predict": predict})
    assert not (tmp_path / "models" / "small").exists()


def test_a_measurement_serves_other_bits(
    convert: Convert, converter: PretendedConverter, source: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "measured.json"
    convert(measurement=kept)
    assert json.loads(kept.read_bytes())["measurement"] == {"layer": 1}
    converter.breaks = 1
    with pytest.raises(KeyboardInterrupt):
        convert(bits=6.0, measurement=kept, replace=True)
    given = json.loads((tmp_path / "work" / work.GIVEN_NAME).read_bytes())
    assert given == {"measurement": {"layer": 1}, "last_module_idx": 3}


def test_a_measurement_of_another_calibration_is_refused(convert: Convert, tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    convert(measurement=kept)
    with pytest.raises(SourceRefused, match="was measured of other weights, on another calibration"):
        convert(measurement=kept, own_texts=["other words " * 200], replace=True)
    kept.write_text("[1]")
    with pytest.raises(SourceRefused, match="is not a measurement that"):
        convert(measurement=kept, bits=5.0, replace=True)


def test_a_measurement_that_could_not_be_kept_is_refused_before_anything_is_done(
    convert: Convert, converter: PretendedConverter, tmp_path: Path
) -> None:
    with pytest.raises(SourceRefused, match="there is no directory"):
        convert(measurement=tmp_path / "nowhere" / "measured.json")
    with pytest.raises(SourceRefused, match="removed at the end"):
        convert(measurement=tmp_path / "work" / "measured.json")
    assert converter.runs == []
    assert not (tmp_path / "work").exists()


def test_rows_of_documents_are_for_this_user_alone(
    convert: Convert, converter: PretendedConverter, tmp_path: Path
) -> None:
    converter.breaks = 1
    with pytest.raises(KeyboardInterrupt):
        convert(own_texts=["a secret " * 200])
    assert (tmp_path / "work" / work.CALIBRATION_NAME).is_file()
    assert (tmp_path / "work").stat().st_mode & 0o777 == 0o700


def test_the_prompt_of_an_imported_source_is_kept(convert: Convert, source: Path, tmp_path: Path) -> None:
    nothing: Any = lambda *_: None  # noqa: E731
    first = import_model(
        source, name="first", models_dir=tmp_path / "models", system_text="Only say what stands there.",
        measure=lambda *_: {}, find_heads=nothing,
    )  # fmt: skip
    card = convert(tmp_path / "models" / "first")
    assert card.prompt == first.prompt
    assert card.digests.template == first.digests.template
    assert card.digests.tokenizer == first.digests.tokenizer


def test_a_name_that_is_taken_is_refused_before_anything_is_done(
    convert: Convert, converter: PretendedConverter
) -> None:
    convert()
    with pytest.raises(NameTaken, match="--replace"):
        convert(bits=5.0)
    assert converter.runs == ["begun"]
    assert convert(bits=5.0, replace=True).quantization == "exl2-5.0bpw"


def test_a_directory_with_other_files_is_not_worked_in(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "letters.txt").write_text("mine")
    with pytest.raises(SourceRefused, match="files that no conversion wrote"):
        convert()
    assert (tmp_path / "work" / "letters.txt").read_text() == "mine"


def test_two_conversions_do_not_share_a_directory(convert: Convert, tmp_path: Path) -> None:
    with work.held(tmp_path / "work"), pytest.raises(SourceRefused, match="another conversion is at work"):
        convert()


@pytest.mark.parametrize("bits", [1.0, 9.0])
def test_bits_out_of_reach_are_refused(convert: Convert, bits: float) -> None:
    with pytest.raises(SourceRefused, match=r"give 2\.2 to 8"):
        convert(bits=bits)


def test_sources_that_cannot_be_converted_are_refused(
    convert: Convert, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    def refused(path: Path, says: str, error: type[Exception] = SourceRefused) -> None:
        with pytest.raises(error, match=says):
            convert(path)

    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "a.gguf", "import a GGUF first")
    refused(tmp_path, "no config.json")
    own = make_model(tmp_path / "own")
    config = json.loads((own / "config.json").read_bytes())
    (own / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    refused(own, "soft-capped", ArchitectureRefused)
    (own / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "exl2", "bits": 3}}))
    refused(own, r"quantized already \(exl2-3\.0bpw\)")
    (own / "config.json").write_text(json.dumps(config))
    (own / "tokenizer.json").unlink()
    refused(own, "no tokenizer.json")
    (own / "model.safetensors").unlink()
    refused(own, "no safetensors")


def test_what_the_import_would_refuse_at_the_end_is_refused_before_anything_is_done(
    convert: Convert, converter: PretendedConverter, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    own = make_model(tmp_path / "own")
    whole, config = (json.loads((own / name).read_bytes()) for name in ("tokenizer.json", "config.json"))
    (own / "tokenizer.json").write_text(json.dumps(whole | {"decoder": None}))
    with pytest.raises(TokenizerRefused, match="neither byte-level"):
        convert(own)
    (own / "tokenizer.json").write_text("{")
    with pytest.raises(SourceRefused):
        convert(own)
    (own / "tokenizer.json").write_text(json.dumps(whole))
    (own / "config.json").write_text(json.dumps(config | {"model_type": "nobody-knows-it"}))
    with pytest.raises(SourceRefused, match="cannot be read"):
        convert(own)
    assert converter.runs == []
    assert not (tmp_path / "work").exists()


def test_without_a_card_nothing_begins(convert: Convert, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineRefused, match=r"needs an NVIDIA card.*copy the finished model"):
        convert(tools={"converter": needs.check_card})
    assert not (tmp_path / "work").exists()


def test_without_a_compiler_or_an_extension_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    with pytest.raises(EngineRefused, match=r"no CUDA compiler.*nvcc"):
        needs.check_extension()
    monkeypatch.setattr(needs, "find_spec", lambda name: name)
    needs.check_extension()


def test_a_full_disk_and_a_small_card_are_told_before(convert: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 16 << 30))
    with pytest.raises(EngineRefused, match=r"at least .* 0\.0 GiB of 16\.0 GiB are free: stop what else"):
        convert(tools={"check_room": needs.check_room})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 << 30, 16 << 30))
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(SourceRefused, match=r"of disk in .*work, and 0\.0 GiB are free: give another directory"):
        convert(tools={"check_room": needs.check_room})


def test_a_damaged_record_is_told(convert: Convert, tmp_path: Path) -> None:
    convert()
    record = tmp_path / "models" / "small" / "conversion.json"
    record.write_text(record.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ModelDamaged, match="format version 2"):
        read_conversion(tmp_path / "models" / "small")
    record.write_text("{")
    with pytest.raises(ModelDamaged, match="cannot be read"):
        read_conversion(tmp_path / "models" / "small")


def test_names_follow_from_source_and_bits() -> None:
    assert default_name(Path("/x/My Model (2)"), 4.25) == "My-Model-2-4.25bpw"
    assert default_name(Path("/x/Qwen3-8B"), 4.0) == "Qwen3-8B-4bpw"
    long = {default_name(Path("/x") / ("m" * 80), bits) for bits in (4.2, 4.25, 4.0)}
    assert len(long) == 3
    assert all(len(name) == 64 and name.endswith("bpw") for name in long)


def test_weights_are_linked_not_copied_where_the_disk_can(convert: Convert, tmp_path: Path) -> None:
    kept: list[int] = []

    def measure(directory: Path, *_: Any) -> dict[str, Any]:
        kept.append((directory / "output.safetensors").stat().st_nlink)
        return {}

    convert(tools={"measure": measure})
    assert kept == [2]
    assert load_file(tmp_path / "models" / "small" / "output.safetensors")
