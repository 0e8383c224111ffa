"""The best tokens of rows, found on the device: logits of a large vocabulary are megabytes, and a host looks through
them row by row while the card waits."""

import math

import torch
from torch import Tensor

from service.engine.protocol import Best


def best_of(logits: Tensor) -> list[Best]:
    """Of each row of FP32 logits ``[n, vocab]``. Waits for the step."""
    found = torch.stack((logits.argmax(-1).double(), logits.sum(-1).double()))  # ids below 2**53 stay whole
    ids, sums = found.tolist()
    return [Best(int(token_id), math.isfinite(total)) for token_id, total in zip(ids, sums, strict=True)]
