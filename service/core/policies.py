"""Retention as this server and its engine allow it."""

from service.core.retention import Bounds, Policy, check_wish, resolve, stored_policy, usable
from service.core.wishes import Wish, stored_wish
from service.db.models import DocumentRow
from service.engine.protocol import EngineClient


class Policies:
    """Asks the engine anew each time: it may come back with another model or budget."""

    def __init__(self, engine: EngineClient, bounds: Bounds) -> None:
        self._engine = engine
        self._bounds = bounds

    def check(self, wish: Wish) -> None:
        """Raises Invalid for a wish that cannot be fulfilled for any document."""
        check_wish(wish, self._engine.info, self._bounds)

    def choose(self, row: DocumentRow, n_tokens: int) -> Policy:
        """For a document that was just tokenized. Raises TooLong, Invalid."""
        return resolve(n_tokens, stored_wish(row.retention), self._engine.info, self._bounds)

    def of(self, row: DocumentRow) -> Policy:
        """What was chosen for a document, or another choice where that cannot be kept to. Raises TooLong, Invalid."""
        policy, n_tokens = stored_policy(row.policy), row.token_count or 0
        if usable(policy, n_tokens, self._engine.info, self._bounds):
            return policy
        return self.choose(row, n_tokens)
