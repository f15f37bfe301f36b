"""The servers that share a queue: what each says of itself, and who makes what.

There is no coordinator. Each server renews its own claims, and puts back those that nobody renews.
"""

from __future__ import annotations

import random
import socket
import time
from dataclasses import asdict
from typing import Any

from loguru import logger

from svdpp import __version__
from svdpp.serve.background import Background
from svdpp.serve.database import AwayError
from svdpp.serve.engine import Engine
from svdpp.serve.form import Capabilities
from svdpp.serve.job import FleetServer
from svdpp.serve.queue import QUEUED, JobQueue
from svdpp.serve.views import size_of

# Two renewals can be late before a claim ends.
_RENEWALS = 3
_MAX_SECONDS = 10.0
_LISTEN_SECONDS = 0.5
# In a large fleet so many free servers try to take a new job; one that nobody takes waits for the
# next turn of a free one.
_MAX_WOKEN = 16
# And so many look in each turn at the other servers and their claims.
_MAX_LOOKING = 64


class Fleet:
    """This server among those that share its queue; alone if nobody shares it."""

    def __init__(self, queue: JobQueue, engine: Engine, capabilities: Capabilities) -> None:
        self._queue = queue
        self._engine = engine
        self._capabilities = capabilities
        self._others: list[FleetServer] = []
        self._renew_at = 0.0
        self._is_away = False
        # After an outage all leases may have ended: those who hold them are to renew them first.
        self._recover_at = time.monotonic() + queue.lease_seconds
        failure = "the server cannot look after its claims"
        self.background = Background("fleet", self._turn, 0.0, failure=failure, last=queue.release)
        """The thread, which at its end hands back what the ranks have not finished."""

    def servers(self) -> list[FleetServer]:
        """This server, then the others as they were seen last."""
        return [self._own(), *self._others]

    def others_of(self, kind: str | None) -> list[FleetServer]:
        """The other live servers that make the clips of a kind."""
        return [other for other in self._others if other.kind == kind and other.is_live]

    def _own(self) -> FleetServer:
        feeder = self._engine.feeder
        return FleetServer(
            id=self._queue.server,
            host=socket.gethostname(),
            version=__version__,
            model=self._capabilities.model,
            weights=self._capabilities.weights,
            sizes=[size_of(*size) for size in self._capabilities.sizes],
            ranks=self._engine.config.world_size,
            state=self._engine.state,
            free=feeder.num_free if self._engine.state == "ready" else 0,
            claims=len(feeder.clips()),
            seen_seconds=0.0,
        )

    # --- the fleet's thread -----------------------------------------------------------------------

    def _turn(self) -> None:
        try:
            if time.monotonic() >= self._renew_at:
                self._renew()
                seconds = min(_MAX_SECONDS, self._queue.lease_seconds / _RENEWALS)
                self._renew_at = time.monotonic() + seconds
            self._listen(min(_LISTEN_SECONDS, max(0.0, self._renew_at - time.monotonic())))
        except AwayError as error:
            if not self._is_away:
                logger.error("{}: the clips in progress go on, and none is taken", error)
            self._is_away = True
            self._renew_at = 0.0
            self._recover_at = time.monotonic() + self._queue.lease_seconds
            raise
        if self._is_away:
            logger.warning("the queue is back")
        self._is_away = False

    def _renew(self) -> None:
        feeder = self._engine.feeder
        lost, to_cancel = self._queue.renew(feeder.steps_done)
        feeder.lose(lost)
        for id in to_cancel:
            feeder.ask_to_cancel(id)
        own = asdict(self._own())
        self._queue.register(own)
        if random.random() * len(self._others) < _MAX_LOOKING:
            self._look(own)
        feeder.wake()

    def _look(self, own: dict[str, Any]) -> None:
        others = []
        for row in self._queue.servers():
            if row["id"] != own["id"] and own.keys() <= row.keys():  # else of another version
                row["is_live"] = row["seen_seconds"] < self._queue.lease_seconds
                others.append(FleetServer(**{name: row[name] for name in own}))
        self._others = others
        if time.monotonic() >= self._recover_at:
            for job in self._queue.recover():
                logger.warning("{} is {}: its server did not renew its claim", job.id, job.state)

    def _listen(self, seconds: float) -> None:
        feeder = self._engine.feeder
        for said in self._queue.database.listen(seconds):
            if said != QUEUED:
                feeder.ask_to_cancel(said)
                continue
            num_free = sum(other.free > 0 for other in self.others_of(self._queue.kind))
            if not feeder.num_free or random.random() * num_free < _MAX_WOKEN:
                feeder.wake()
