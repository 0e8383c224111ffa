"""Choosing the next token from logits. Independent of the batch: each request has its own random numbers."""

import torch

from service.engine.messages import Sampling

_LEAST_TEMPERATURE = 1e-6
"""Logits divided by less could overflow; the likeliest token is all but certain long before."""


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

    def pick(self, logits: torch.Tensor) -> int:
        """A token id from float32 logits ``[vocab]``. Raises NotFinite."""
        if not bool(torch.isfinite(logits).all()):
            raise NotFinite("the logits are not finite")
        if self._sampling.temperature <= 0:
            return int(logits.argmax())
        logits, ids = self._candidates(logits)
        probabilities = torch.softmax(logits.double() / max(self._sampling.temperature, _LEAST_TEMPERATURE), dim=-1)
        probabilities = _nucleus(probabilities, self._sampling.top_p)
        return int(ids[torch.multinomial(probabilities, 1, generator=self._random)])

    def _candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and ids, best first, cut to top-k."""
        if 0 < self._sampling.top_k < logits.numel():
            return torch.topk(logits, self._sampling.top_k)
        return torch.sort(logits, descending=True, stable=True)


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest best ones whose sum reaches `top_p`; at least one."""
    if top_p >= 1:
        return probabilities
    before = probabilities.cumsum(0) - probabilities
    kept = before < top_p
    kept[0] = True
    return probabilities * kept
