"""What is where in a simulation: bytes of documents with a budget, the longest unused out first."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator


class Shelf:
    """Documents within a budget. Those with users stay, and are more than the budget rather than gone. `moved_out` is
    told of each that leaves."""

    def __init__(self, budget_nbytes: float, moved_out: Callable[[int], object] = lambda _: None) -> None:
        self._budget = budget_nbytes
        self._moved_out = moved_out
        self._held: OrderedDict[int, float] = OrderedDict()
        self._users: Counter[int] = Counter()
        self.nbytes = 0.0

    def __contains__(self, document: int) -> bool:
        return document in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def touch(self, document: int) -> None:
        """It was used now."""
        if document in self._held:
            self._held.move_to_end(document)

    def make_room(self, nbytes: float) -> bool:
        """Let what nobody uses go until there is room; False when that is not enough."""
        for document in list(self._held):
            if self.nbytes + nbytes <= self._budget:
                break
            if not self._users[document]:
                self.drop(document)
        return self.nbytes + nbytes <= self._budget

    def put(self, document: int, nbytes: float) -> bool:
        """Keep a document if there can be room for it."""
        if document in self._held:
            self.touch(document)
            return True
        if not self.make_room(nbytes):
            return False
        self._held[document] = nbytes
        self.nbytes += nbytes
        return True

    def drop(self, document: int) -> None:
        self.nbytes -= self._held.pop(document)
        self._moved_out(document)

    def clear(self) -> None:
        self._held.clear()
        self.nbytes = 0.0

    def use(self, document: int) -> None:
        self._users[document] += 1

    def leave(self, document: int) -> None:
        """An answer about it is over."""
        self._users[document] -= 1
        self.touch(document)
