"""exllamav2 as it comes, on the same weights in the same run: what ours is compared with.

Without flash-attn it computes prefill without a causal mask and in chunks that shrink with the context; both are its
own defaults and are left as they are. Its caches are filled with zeros here: its speed does not depend on values.
"""

import gc
import itertools
import time
from pathlib import Path

import torch

from benchmarks.gpu_lib import median, sync

DEPTHS = (0, 4096, 16384, 32768, 65536, 98304, 130816)
"""Where stock prefill is sampled to add up a whole document of 128K."""


class Stock:
    """A model directory loaded by exllamav2, with its 4-bit cache for `max_tokens` tokens."""

    def __init__(self, model_dir: Path, max_tokens: int) -> None:
        from exllamav2 import ExLlamaV2, ExLlamaV2Cache_Q4, ExLlamaV2Config

        config = ExLlamaV2Config(str(model_dir))
        config.max_seq_len = max_tokens
        self._model = ExLlamaV2(config)
        self._model.load()
        self._cache = ExLlamaV2Cache_Q4(self._model, max_seq_len=max_tokens)
        self._vocab = int(config.vocab_size)

    def close(self) -> None:
        """Give the card's memory back."""
        self._model.unload()
        del self._model, self._cache
        gc.collect()
        torch.cuda.empty_cache()

    def decode(self, n_context: int, *, limit_s: float = 3.0, most: int = 64) -> list[float]:
        """Seconds of single steps behind `n_context` tokens, logits on the host, after warm-up steps."""
        token = torch.tensor([[5]])
        samples: list[float] = []
        started = time.perf_counter()
        while len(samples) < most and (len(samples) < 8 or time.perf_counter() - started < limit_s):
            self._cache.current_seq_len = n_context
            at = time.perf_counter()
            with torch.inference_mode():
                self._model.forward(token, self._cache).float().cpu()
            samples.append(time.perf_counter() - at)
        return samples[3:]

    def prefill_s(self, n_past: int, n_tokens: int) -> float:
        """Seconds to prefill `n_tokens` behind `n_past`, in chunks of its own choosing."""
        ids = torch.randint(0, self._vocab, (1, n_tokens))
        self._cache.current_seq_len = n_past
        sync()
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.forward(ids, self._cache, preprocess_only=True)
        sync()
        return time.perf_counter() - started

    def seconds_per_token(self, n_past: int) -> float:
        """Of prefill at that depth: the better of two runs of at least two of its chunks, after a warm-up."""
        chunk = int(((n_past**2 + 4 * 2048**2) ** 0.5 - n_past) / 2)
        n = min(max(2 * min(chunk, 2048), 64), self._cache.max_seq_len - n_past)
        self.prefill_s(n_past, min(n, chunk))
        return min(self.prefill_s(n_past, n) for _ in range(2)) / n


def integrated_s(samples: list[tuple[int, float]], n_tokens: int) -> float:
    """Seconds of a whole prefill from (depth, seconds a token) in order of depth: trapezoids, ends held constant."""
    points = [(0, samples[0][1]), *samples, (n_tokens, samples[-1][1])]
    points = [(min(at, n_tokens), cost) for at, cost in points]
    return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in itertools.pairwise(points))


def tokens_s(samples: list[float]) -> float:
    return 1 / median(samples)
