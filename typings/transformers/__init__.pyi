"""For the type checker alone: transformers' own package names every class of every model, in which a checker reads for
as long as in half of Preread. What is taken from it has no types (`service/engine/models/light_transformers.py`)."""

from typing import Any

def __getattr__(name: str) -> Any: ...
