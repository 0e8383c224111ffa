"""A `Runner` without a model that plays a draft model: what it guesses follows from the last token alone."""

from itertools import pairwise

from service.engine.fake_runner import SCRIPT_LOGIT, FakeRunner


class Successor(FakeRunner):
    """After `tokens[i]` it guesses `tokens[i + 1]`, which are different ones; after others `other`. `sure`: how sure it
    is of that, as a logit."""

    def __init__(self, tokens=(), other=500, sure=SCRIPT_LOGIT, **more) -> None:
        more = {"block_tokens": 8, "chunk_tokens": 32, "n_layers": 1, "n_slots": 4, "weights": "draft"} | more
        super().__init__(**more)
        self.follows = dict(pairwise(tokens))
        self.other = other
        self.sure = sure
        self.fails = False
        """Whether the next forwards raise."""

    def forward(self, batch):
        if self.fails:
            raise RuntimeError("the draft model is out of memory")
        return super().forward(batch)

    def _logits(self, document, tail, token):
        logits = super()._logits(document, tail, token)
        if tail is not None:
            logits[self.follows.get(token, self.other)] += self.sure
        return logits


class Costs:
    """Measured costs: `per_row` of a step for each further row."""

    base_s = 1.0

    def __init__(self, per_row=0.0) -> None:
        self.per_row = per_row

    def record(self, *_):
        pass

    def has_base(self, _):
        return True

    def ratio(self, n_sequences, n_rows):
        return 1.0 + self.per_row * (n_rows - n_sequences)
