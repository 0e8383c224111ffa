"""Choosing the next token from logits. Independent of the batch: each request has its own random numbers."""

import math

import torch

from service.engine.messages import Sampling
from service.engine.protocol import Best

_LEAST_TEMPERATURE = 1e-6
"""Logits divided by less could overflow; the likeliest token is all but certain long before."""


_HEAD = 1024
"""The nucleus is looked for among this many best tokens before all of a vocabulary is sorted."""


_NOT_FINITE = "the logits are not finite"


class NotFinite(Exception):
    """The logits hold NaN or infinity: the computation is broken, no token may come of it."""


class Sampler:
    """Greedy at temperature 0; else temperature, then top-k, then top-p (nucleus, Holtzman et al. 2020).

    Same seed and same logits give the same tokens. Without a seed each sampler is different.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed & (2**63 - 1))

    @property
    def only_best(self) -> bool:
        """Whether it takes the best token always: it needs no logits then."""
        return self._sampling.temperature <= 0

    def pick(self, logits: torch.Tensor | Best) -> int:
        """A token id from float32 logits ``[vocab]``, or where it is greedy from what was found on a device. Raises
        NotFinite."""
        if isinstance(logits, Best):
            return _checked(logits)
        if not math.isfinite(float(logits.sum())):  # one NaN or infinity makes the sum one; far cheaper than isfinite
            raise NotFinite(_NOT_FINITE)
        if self._sampling.temperature <= 0:
            return int(logits.numpy().argmax())  # the first of the largest, as torch says, in a twentieth of its time
        probabilities, ids = self._candidates(logits)
        return int(ids[torch.multinomial(probabilities, 1, generator=self._random)])

    def _candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is drawn from: unnormalized probabilities and the ids they belong to."""
        sampling, n = self._sampling, logits.numel()
        scaled = logits.double() / max(sampling.temperature, _LEAST_TEMPERATURE)
        if 0 < sampling.top_k < n:
            best, ids = torch.topk(scaled, sampling.top_k)
            return _nucleus(torch.softmax(best, -1), sampling.top_p), ids
        probabilities = torch.softmax(scaled, -1)
        if sampling.top_p >= 1:
            return probabilities, torch.arange(n)
        best, ids = torch.topk(probabilities, min(_HEAD, n))
        if float(best.sum()) < sampling.top_p:
            best, ids = torch.sort(probabilities, descending=True, stable=True)
        return _nucleus(best, sampling.top_p), ids


def _checked(best: Best) -> int:
    if not best.is_finite:
        raise NotFinite(_NOT_FINITE)
    return best.token_id


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest best ones whose sum reaches `top_p`; at least one."""
    if top_p >= 1:
        return probabilities
    before = probabilities.cumsum(0) - probabilities
    kept = before < top_p
    kept[0] = True
    return probabilities * kept
