"""Measured speeds: bytes a second of each tier, tokens a second of prefill. They decide what is worth restoring."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

PREFILL = "prefill"
WEIGHT = 0.3
"""Of the newest measurement in the moving figure."""
SMALLEST_NBYTES = 1 << 20
"""Less says more about the way there than about the speed."""
SMALLEST_TOKENS = 32
KEPT_S = 7 * 24 * 3600.0
TRUSTED_S = 600.0
SAVE_S = 5.0


class Speed(msgspec.Struct, frozen=True):
    """`per_s`: bytes, of prefill tokens; `at`: when it was measured last (Unix seconds)."""

    per_s: float
    at: float
    n: int = 1


class SpeedBook:
    """Moving figures, kept in a file for other processes and the next start. Only speed depends on them: what cannot be
    read or written is left out."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._saved_at = 0.0
        self._speeds = self._load()

    def record_bytes(self, tier: str, nbytes: int, seconds: float) -> None:
        """So many bytes came from a tier, checked, in so much time."""
        if nbytes >= SMALLEST_NBYTES:
            self._record(tier, nbytes / max(seconds, 1e-6))

    def record_prefill(self, n_tokens: int, seconds: float) -> None:
        """So many tokens of a document were computed."""
        if n_tokens >= SMALLEST_TOKENS:
            self._record(PREFILL, n_tokens / max(seconds, 1e-6))

    def speed(self, what: str, newer_than_s: float = KEPT_S) -> float | None:
        """Of a tier, or `PREFILL`; None when it was not measured lately."""
        found = self._speeds.get(what)
        return None if found is None or self._clock() - found.at > newer_than_s else found.per_s

    def restore_s(self, tier: str, nbytes: int, newer_than_s: float = KEPT_S) -> float | None:
        """Seconds that bringing `nbytes` would take."""
        speed = self.speed(tier, newer_than_s)
        return None if speed is None else nbytes / speed

    def recompute_s(self, n_tokens: int) -> float | None:
        """Seconds that computing a document would take."""
        speed = self.speed(PREFILL)
        return None if speed is None else n_tokens / speed

    @property
    def prefill(self) -> float | None:
        """Tokens a second; None when that was not measured lately."""
        return self.speed(PREFILL)

    def pays(self, tier: str, nbytes: int, n_tokens: int) -> bool:
        """Whether bringing a snapshot is faster than computing it. It is when that is not known: a speed measured too
        long ago is measured again."""
        restore, recompute = self.restore_s(tier, nbytes, TRUSTED_S), self.recompute_s(n_tokens)
        return restore is None or recompute is None or restore <= recompute

    def _record(self, what: str, per_s: float) -> None:
        with self._lock:
            before = self._speeds.get(what)
            now = self._clock()
            if before is None or now - before.at > KEPT_S:
                self._speeds[what] = Speed(per_s, now)
            else:
                mean = before.per_s * (1 - WEIGHT) + per_s * WEIGHT
                self._speeds[what] = Speed(mean, now, before.n + 1)
            if now - self._saved_at >= SAVE_S or before is None:
                self._saved_at = now
                self._save()

    def _load(self) -> dict[str, Speed]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Speed])
        except (OSError, msgspec.DecodeError):
            return {}

    def _save(self) -> None:
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        try:
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(
                    msgspec.json.encode(self._speeds | {k: v for k, v in self._load().items() if k not in self._speeds})
                )
            os.rename(unfinished, self._path)
        except OSError:
            pass
