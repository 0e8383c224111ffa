"""A windowed document through the whole engine on the card: built, and asked about."""

import shutil

from benchmarks.gpu_decode import context_name
from benchmarks.gpu_engine import Engine, Request, Text, expect
from benchmarks.gpu_lib import Row, median, spread
from benchmarks.gpu_windowed_lib import PROMPT_TOKENS, QUESTION_TOKENS, Bench, index_heads, numbers
from service.engine.messages import BuildDone, Retention

ASKED = 4


class Whole(Bench):
    """Measurements of host, scheduler, store and runner together."""

    def whole(self) -> None:
        """A document of two segments, with a sixteenth of its rows resident."""
        n, sizes = 2 * self.sizes.segment, self.sizes
        slots = max(n // 16 - sizes.sinks, 256)
        retention = Retention(sizes.sinks, slots, 256, sizes.segment, sizes.fetch)
        text = Text.numbered("windowed", n, self.runner.limits.vocab_size)
        root = self.work / "windowed-engine"
        shutil.rmtree(root, ignore_errors=True)
        try:
            engine = self.engine()
            try:
                self.built(engine, text, retention)
                self.asked(engine, text, retention)
            finally:
                engine.close()
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def engine(self) -> Engine:
        return Engine(
            self.runner,
            self.work / "windowed-engine",
            budget_nbytes=1 << 40,
            max_batch=2,
            index_heads=index_heads(self.runner.layout),
            replay_ids=numbers(PROMPT_TOKENS, 250, 9),
        )

    def built(self, engine: Engine, text: Text, retention: Retention) -> None:
        request = engine.build(text, retention)
        done = expect(request, BuildDone)
        times: dict[str, float] = {}
        for (at, event), (after, _) in zip(request.events, request.events[1:], strict=False):
            stage = getattr(event, "stage", "")
            times[stage] = times.get(stage, 0.0) + after - at
        first = request.events[0][0] - request.started
        stages = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in times.items())
        what = f"through the engine: build of {context_name(len(text.ids))}, {done.resident_tokens} rows resident"
        figure = f"{request.seconds:.1f} s, {len(text.ids) / request.seconds:.0f} tok/s"
        beside = f"{stages}; first event after {first:.1f} s; index {done.index_nbytes / 1e6:.1f} MB"
        self.result.add(Row(what, figure, beside=beside))

    def asked(self, engine: Engine, text: Text, retention: Retention) -> None:
        """Questions in sessions of their own, and the same behind a short context."""
        plain = Text.numbered("plain", self.sizes.context, self.runner.limits.vocab_size)
        expect(engine.build(plain), BuildDone)
        short = [engine.answered(plain, n_prompt=QUESTION_TOKENS) for _ in range(ASKED)]
        found = [engine.answered(text, n_prompt=QUESTION_TOKENS, retention=retention) for _ in range(ASKED)]
        ms = [request.first_token_s * 1e3 for request in found[1:]]
        fetch = [request.source.fetch_ms for request in found[1:]]
        beside = f"fetching {median(fetch):.1f} ms of it; {median(first_ms(short[1:])):.1f} ms behind a short context"
        what = f"through the engine: question to its first token, document of {context_name(len(text.ids))}"
        self.result.add(Row(what, f"{median(ms):.1f} ms", f"{spread(ms)} ms", beside=beside))


def first_ms(requests: list[Request]) -> list[float]:
    return [request.first_token_s * 1e3 for request in requests]
