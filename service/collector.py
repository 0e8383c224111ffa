"""Python's garbage collector, held back while a program starts."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """No collections meanwhile, and none of what was made ever after.

    A start makes a million objects that stay: modules, classes, functions. Walking them again and again is a tenth
    of the time that the imports take, later a pause in the middle of an answer, and seconds at the end (see the `gc`
    module on `freeze`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
