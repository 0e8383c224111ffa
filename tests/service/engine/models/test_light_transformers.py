"""What is left out while transformers is imported is there when it is needed."""

import json
import subprocess
import sys
from pathlib import Path

from service.engine.models.importer import import_model

ROOT = Path(__file__).parents[4]
CODE = """
import importlib.util, json, sys
from pathlib import Path
from types import ModuleType
import torch
from service.engine.torch_engine.loading import load_model
from service.engine.models.light_transformers import no_compiler
model = load_model(Path(sys.argv[1]), "float32", "cpu").model
names = ("torch._dynamo", "torch.distributed.tensor", "triton", "boto3")
left_out = [name for name in names if name not in sys.modules]
found = importlib.util.find_spec("torch._dynamo").origin == torch.__path__[0] + "/_dynamo/__init__.py"
sys.modules["torch._dynamo"] = compiler = ModuleType("torch._dynamo")
with no_compiler():
    kept = sys.modules["torch._dynamo"] is compiler
print(json.dumps([left_out, found, kept, torch.distributed.is_available()]))
"""


def test_the_engine_loads_neither_torchs_compiler_nor_its_distributed_tensors_and_others_may(
    source: Path, tmp_path: Path
) -> None:
    import_model(source, name="tiny", models_dir=tmp_path, measure=lambda *_: {}, find_heads=lambda *_: None)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "tiny")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    left_out, *others = json.loads(done.stdout)
    assert left_out == ["torch._dynamo", "torch.distributed.tensor", "triton", "boto3"]
    assert others == [True, True, True]


PARTS = """
import torch
from service.engine.models.light_transformers import no_compiler
with no_compiler():
    import torch._dynamo.utils
from torch.nn.attention.bias import causal_lower_right
print(torch._dynamo.utils.dynamo_timed.__name__)
"""


def test_the_compiler_can_be_loaded_when_parts_of_it_were() -> None:
    """What `import exllamav2` does on a card, after a version of transformers that asks for such a part."""
    done = subprocess.run([sys.executable, "-c", PARTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["dynamo_timed"]
