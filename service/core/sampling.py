"""Sampling parameters of a question: checked against what the engine can do, refused with the numbers."""

from dataclasses import dataclass
from typing import Any

from service.engine.messages import Sampling
from service.errors import Invalid

MAX_STOPS = 8
MAX_STOP_CHARS = 200
MAX_TEMPERATURE = 5.0
MAX_TOP_K = 1000


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its parameters as they came; None means the default. The default is greedy."""

    text: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def check(self) -> None:
        """Raises Invalid, naming the parameter, for what can be judged without the session."""
        if not self.text.strip():
            raise Invalid("The question is empty.", param="question")
        _in_range("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _in_range("top_k", self.top_k, 0, MAX_TOP_K)
        _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise Invalid(f"top_p is {self.top_p}; it must be above 0 and at most 1.", param="top_p")
        if len(self.stop) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in self.stop):
            raise Invalid(f"stop takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters.", param="stop")

    def sampling(self, max_tokens: int) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            stop=self.stop,
        )

    def parameters(self, max_tokens: int) -> dict[str, Any]:
        """What the turn's row keeps of the parameters."""
        sampling = self.sampling(max_tokens)
        return {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")} | {
            "stop": list(self.stop)
        }


def _in_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise Invalid(f"{name} is {value}; it must be from {low} to {high}.", param=name)
