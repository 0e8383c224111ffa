"""Triton's interpreter, for kernels on CPU tensors where there is no card."""

import os
from importlib.util import find_spec

import torch


def use_interpreter() -> None:
    """To be called before the first import of a kernel: Triton decides when a kernel is defined.

    Triton 3.6 takes a loop's bounds with ``int(array)``, which NumPy refuses since 2.5 for arrays of one element; its
    patch of tensors is completed here.
    """
    if torch.cuda.is_available() or not find_spec("triton"):
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "takes_one_element", False):
        return

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patch_lang_tensor.takes_one_element = True
    interpreter._patch_lang_tensor = patch_lang_tensor
