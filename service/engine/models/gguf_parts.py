"""A GGUF may be one of several parts of a model, with some of its tensors only. Needs no torch."""

import re
from pathlib import Path

from service.engine.models.errors import SourceRefused
from service.engine.models.gguf_header import Header

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def check_whole(path: Path, header: Header) -> None:
    """Raises SourceRefused for a part, told by its name or, where it was renamed, by what its header says."""
    if _PART.search(path.name) or header.number("split.count", 0) > 1:
        raise SourceRefused(f"{path} is one of several parts: join them with llama.cpp's `llama-gguf-split --merge`")
