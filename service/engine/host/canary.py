"""The canary: logits at a document's last token, stored at build, compared when it is first attached.

It proves what checksums cannot: that these bytes, decoded by this engine, mean what they meant to the engine
that wrote them.
"""

from typing import Any

import torch

from cache_store.manifest import Canary

TOP_K = 8
TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5, "float16": 0.1, "ggml": 0.1, "ggml-f16": 2.0}
"""Largest difference of a logit by compute dtype. Measured on the demo model between a row alone and the same row
in a batch: 3e-5 in FP32, 0.125 (one unit in the last place) in BF16.
llama.cpp sums values up in F16 where they are stored so ("ggml-f16"): 0.65 between two places of the same rows in its
cache, of logits of about 30; none where they are quantized, as rows lie in the order of their positions."""


class CanaryMismatch(Exception):
    """The logits at the document's last token are not those stored with it."""


def make_canary(logits: torch.Tensor) -> Canary:
    """The canary of float32 logits ``[vocab]``."""
    top = torch.topk(logits, min(TOP_K, logits.numel()))
    return Canary(tuple(top.indices.tolist()), tuple(top.values.tolist()))


def check_canary(canary: Canary | None, logits: Any, compute_dtype: str) -> None:
    """Raises CanaryMismatch. A snapshot without a canary passes."""
    if canary is None:
        return
    found = logits[list(canary.token_ids)]
    worst = (found - torch.tensor(canary.logits)).abs().max().item()
    if not worst <= TOLERANCE[compute_dtype]:
        raise CanaryMismatch(f"a logit at the document's last token is off by {worst:.3g}")
