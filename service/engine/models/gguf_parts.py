"""A GGUF may be one of several parts of a model, with some of its tensors only. Needs no torch."""

import re
from pathlib import Path
from typing import Any

from service.engine.models.errors import SourceRefused

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_COUNT = "split.count"


def check_whole(path: Path, reader: Any) -> None:
    """Raises SourceRefused for a part, told by its name or, where it was renamed, by what `reader` finds in it."""
    count = reader.get_field(_COUNT)
    if _PART.search(path.name) or (count is not None and int(count.contents()) > 1):
        raise SourceRefused(f"{path} is one of several parts: join them with llama.cpp's `llama-gguf-split --merge`")
