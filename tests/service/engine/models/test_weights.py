from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from service.engine.models.errors import ModelDamaged
from service.engine.models.weights import config_digest, tensor_spans, weights_digest

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6, dtype=np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


def saved(directory: Path, **files: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    for name, tensors in files.items():
        save_file(tensors, directory / f"{name}.safetensors", metadata={"format": name})
    return directory


def test_the_split_into_files_is_not_identity(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", model=TENSORS)
    halves = {
        "x": {"b.weight": TENSORS["b.weight"]},
        "y": {k: v for k, v in TENSORS.items() if k != "b.weight"},
    }
    told: list[tuple[int, int]] = []
    assert weights_digest(saved(tmp_path / "two", **halves), lambda *p: told.append(p)) == weights_digest(one)
    assert told[-1] == (60, 60)


@pytest.mark.parametrize(
    "changed",
    [
        {**TENSORS, "a.weight": TENSORS["a.weight"].reshape(4, 3)},
        {**TENSORS, "a.weight": TENSORS["a.weight"].view(np.int32)},
        {**TENSORS, "b.weight": TENSORS["b.weight"] + np.float16(0.001)},
        {"a.weight": TENSORS["a.weight"], "c.weight": TENSORS["b.weight"], "empty": TENSORS["empty"]},
        {k: v for k, v in TENSORS.items() if k != "empty"},
    ],
)
def test_any_change_of_a_tensor_is(tmp_path: Path, changed: dict[str, np.ndarray]) -> None:
    before = weights_digest(saved(tmp_path / "before", m=TENSORS))
    assert weights_digest(saved(tmp_path / "after", m=changed)) != before


def test_every_byte_counts(tmp_path: Path) -> None:
    directory = saved(tmp_path / "m", m=TENSORS)
    path = directory / "m.safetensors"
    data = path.read_bytes()
    digests = {weights_digest(directory)}
    for span in tensor_spans(directory):
        for position in range(span.first, span.last):
            path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            digests.add(weights_digest(directory))
    assert len(digests) == 61


def test_damage_is_named(tmp_path: Path) -> None:
    directory = saved(tmp_path / "m", m=TENSORS)
    path = directory / "m.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ModelDamaged, match="is cut off: 1 of its 292 bytes are missing"):
        weights_digest(directory)
    path.write_bytes(data[:20])
    with pytest.raises(ModelDamaged, match="not a safetensors file"):
        weights_digest(directory)
    path.write_bytes(data[:8] + b"?" + data[9:])
    with pytest.raises(ModelDamaged, match="damaged header"):
        weights_digest(directory)
    path.write_bytes(data)
    (directory / "n.safetensors").write_bytes(data)
    with pytest.raises(ModelDamaged, match="holds a tensor twice"):
        weights_digest(directory)


def test_config_identity_is_what_is_computed() -> None:
    base = {
        "hidden_size": 64,
        "rms_norm_eps": 1e-5,
        "_name_or_path": "a",
        "rope_theta": 1e4,
        "dtype": "float32",
    }
    assert config_digest(base) == config_digest(base | {"_name_or_path": "b", "rope_theta": 5e5, "dtype": "float16"})
    assert config_digest(base) != config_digest(base | {"rms_norm_eps": 1e-6})
