"""Work that goes on beside the requests, for as long as the server runs."""

import asyncio
from abc import ABC, abstractmethod


class Background(ABC):
    """One task of `_run`, which a subclass has and which does not end by itself."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Cancel the task and wait until nothing of it runs any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @abstractmethod
    async def _run(self) -> None: ...
