"""The parts of the EXL2 copy that need no card: what the converter is told about a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_exl2_copy as copy

STORED = {"model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}


def test_the_converter_reads_our_base_of_rope(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(STORED))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x")
    copy.make_view(model, tmp_path / "view")
    config = json.loads((tmp_path / "view" / "config.json").read_bytes())
    assert config == {
        "model_type": "llama", "hidden_size": 64, "rope_theta": 1e5, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert (tmp_path / "view" / "model.safetensors").read_bytes() == b"x"


@pytest.mark.parametrize("change", [{"model_type": "granite"}, {"rope_parameters": {"rope_type": "yarn"}}])
def test_what_is_not_translated_is_refused(change: dict) -> None:
    with pytest.raises(SystemExit, match="not translated"):
        copy.exllama_config(STORED | change)


def test_the_modules_that_stand_in_satisfy_who_looks_for_them() -> None:
    """torch asks for the spec of every module it knows, pandas among them."""
    prelude = copy.CONVERT.rsplit("runpy.run_module", 1)[0]
    check = "import pandas, fastparquet; assert importlib.util.find_spec('pandas').loader is None"
    subprocess.run([sys.executable, "-S", "-c", prelude + check], check=True, timeout=300)
