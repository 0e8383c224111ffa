"""From samples to rows: beside each figure the bytes that had to move for it, and what the hardware allows."""

from service.bench.physics import Physics
from service.bench.results import Row
from service.bench.talk import QUESTION_TOKENS


class Figures:
    """Rows of what was measured. Without `physics` nothing stands beside them."""

    def __init__(self, physics: Physics | None) -> None:
        self._physics = physics

    def prefill(self, context: int, speeds: list[float]) -> Row:
        """Tokens a second of documents that were read as jobs."""
        name = f"prefill, {context} tokens"
        if (physics := self._physics) is None:
            return Row(name, "tok/s", speeds)
        nbytes, flops = physics.prefill(context)
        bound = physics.prefill_tok_s(context)
        gbps = Row(name, "tok/s", speeds).value / context * nbytes / 1e9
        return Row(name, "tok/s", speeds, nbytes=nbytes, gbps=gbps, bound=bound, flops=flops)

    def cold(self, context: int, seconds: list[float]) -> Row:
        """From a document to the first token of its first answer."""
        if (physics := self._physics) is None:
            return self.first("cold", context, seconds)
        read_s = context / physics.prefill_tok_s(context)
        return self.first("cold", context, seconds, physics.prefill(context)[0], read_s)

    def decode(self, name: str, samples: list[float], context: int, users: int, documents: int) -> Row:
        """Tokens a second of all users together."""
        row = Row(name, "tok/s", samples)
        if (physics := self._physics) is None:
            return row
        nbytes, flops = physics.step(context, users, documents)
        steps = row.value / users
        bound = users * min(physics.bandwidth_gbps * 1e9 / nbytes, physics.tflops * 1e12 / flops)
        return Row(name, "tok/s", samples, nbytes=nbytes, gbps=steps * nbytes / 1e9, bound=bound, flops=flops)

    def first(
        self, source: str, context: int, seconds: list[float], moved_nbytes: float = 0.0, moved_s: float = 0.0
    ) -> Row:
        """First token of an answer for which `moved_nbytes` had to come into memory, which takes `moved_s` at least."""
        row = Row(f"first token, {source}, {context} tokens", "s", seconds, higher_is_better=False)
        if (physics := self._physics) is None or not row.value:
            return row
        nbytes = moved_nbytes + physics.step(context, 1, 1)[0]
        bound = moved_s + physics.question_s(context, QUESTION_TOKENS)
        return Row(row.name, "s", seconds, False, nbytes, nbytes / row.value / 1e9, bound)

    def restored(
        self, source: str, context: int, firsts: list[float], restores: list[float], raw_gbps: float
    ) -> list[Row]:
        """First token and restore of a document that came from `source`, which gives `raw_gbps` GB/s at most (0: not
        known). The sizes are known by the model's dimensions: without physics there is no row of the restore."""
        if (physics := self._physics) is None:
            return [self.first(source, context, firsts)]
        nbytes = float(context * physics.stored_row_nbytes)
        speeds = [nbytes / max(seconds, 1e-9) / 1e9 for seconds in restores]
        row = Row(f"restore, {source}, {context} tokens", "GB/s", speeds, nbytes=nbytes, bound=raw_gbps)
        row = Row(row.name, row.unit, speeds, nbytes=nbytes, gbps=row.value, bound=raw_gbps)
        raw_s = nbytes / raw_gbps / 1e9 if raw_gbps else 0.0
        return [self.first(source, context, firsts, nbytes, raw_s), row]

    @property
    def host_gbps(self) -> float:
        """Of the way from host memory to a card; 0 where that is not known."""
        return self._physics.host_gbps if self._physics else 0.0
