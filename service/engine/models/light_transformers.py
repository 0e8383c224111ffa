"""transformers, without what it imports for models that are compiled or distributed: Preread has none.

Half of the time that loading a model's classes takes goes to torch's compiler and to its distributed tensors, which a
process of Preread then never uses. Every module of Preread takes transformers from here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_CLOUD = "boto3"
"""accelerate asks about it for training on SageMaker, and imports it where it is installed."""


class _NoCompiler(ModuleType):
    """In the place of torch's compiler: its decorators do nothing, its submodules are the real ones."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        spec = find_spec(_COMPILER)
        self.__path__ = list(spec.submodule_search_locations or ()) if spec else []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _as_it_is


def _as_it_is(function: Any = None, *_: object, **__: object) -> Any:
    return _as_it_is if function is None else function


@contextmanager
def no_compiler() -> Iterator[None]:
    """Marks for torch's compiler do nothing meanwhile, unless it is loaded already: they would load it. A model is made
    in this, for torch marks what it fills weights with."""
    if _COMPILER in sys.modules:
        yield
        return
    sys.modules[_COMPILER] = _NoCompiler()
    before = set(sys.modules)
    try:
        yield
    finally:
        del sys.modules[_COMPILER]
        # The compiler's own import, should it come (exllamav2 asks for it), would take these for done, and miss them
        # where it expects them: on itself.
        for name in [name for name in sys.modules if name.startswith(_COMPILER + ".") and name not in before]:
            del sys.modules[name]


@contextmanager
def _alone() -> Iterator[None]:
    """torch says that it is not distributed."""
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    hidden = _CLOUD not in sys.modules
    if hidden:
        sys.modules[_CLOUD] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        if hidden:
            del sys.modules[_CLOUD]


with no_compiler(), _alone():
    from transformers import (
        AttentionInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        PreTrainedTokenizerBase,
        masking_utils,  # noqa: F401 - every model class imports it
        utils,
    )

logging = utils.logging

__all__ = [
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "GenerationConfig",
    "PreTrainedTokenizerBase",
    "logging",
    "no_compiler",
]
