"""transformers' config of a model directory, made of a `config.json` that was checked."""

from pathlib import Path
from typing import Any

from service.engine.models.decoder import read_decoder
from service.engine.models.light_transformers import AutoConfig
from service.engine.models.source import read_by_others


def stored_config(directory: Path) -> Any:
    """Raises SourceRefused and ArchitectureRefused as `read_decoder`, which names the key, and SourceRefused for what
    transformers refuses beyond that."""
    read_decoder(directory)
    with read_by_others(directory):
        return AutoConfig.from_pretrained(str(directory), local_files_only=True)
