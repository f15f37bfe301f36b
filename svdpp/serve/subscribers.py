"""Number of clients that follow jobs, and a limit on how often the queue is queried for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

# Minimum seconds between two queries of the queue for one subscriber.
_LOOK_SECONDS = 0.25
# Maximum number of queries per second for all subscribers together, to limit the CPU load.
_LOOKS_PER_SECOND = 200


@dataclass
class SubscriberCounts:
    """Number of clients that follow jobs, and a limit on how often the queue is queried for them.

    A client follows a job by an event stream. Open archives are counted as clients, too.
    """

    by_owner: Counter[str] = field(default_factory=Counter)
    """Number of clients that follow a job, by the name of the API key."""
    is_closed: bool = False
    """Whether the server is ending. Clients then get a last event with the present state."""

    @property
    def total(self) -> int:
        """Number of clients, of all API keys, that follow a job."""
        return self.by_owner.total()

    def count(self, owner: str) -> int:
        """Return the number of clients that follow a job with one API key.

        Args:
            owner: Name of the API key.
        """
        return self.by_owner[owner]

    @contextlib.contextmanager
    def subscribe(self, owner: str) -> Iterator[None]:
        """Count one more client of an API key while the `with` block runs.

        Args:
            owner: Name of the API key.
        """
        self.by_owner[owner] += 1
        try:
            yield
        finally:
            self.by_owner[owner] -= 1

    async def wait(self) -> None:
        """Sleep until the server may read the queue again for a client that follows a job.

        The more clients follow jobs, the longer the sleep.
        """
        await asyncio.sleep(max(_LOOK_SECONDS, self.total / _LOOKS_PER_SECOND))
