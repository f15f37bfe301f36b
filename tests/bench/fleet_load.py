"""What a thousand servers ask of one PostgreSQL (docs/fleet.md, "A thousand servers").

    python -m tests.bench.fleet_load --servers 1000 --rate 116

Starts a database in a temporary folder. Each simulated server claims a clip, holds it for so long
that all together complete `--rate` clips a second, completes it, requests another one, and looks
after its claim as `svdpp.serve.fleet` does. No machine here has the memory for 3,000 connections,
so the servers share those of `--threads` threads, two for each. `--listeners` further connections
wait for notices, as one of each server does.
"""

from __future__ import annotations

import copy
import heapq
import random
import secrets
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import psycopg

from svdpp.serve import fleet
from svdpp.serve.job import Job
from svdpp.serve.queue import JobQueue
from tests.bench.fleet_claims import fleet_queues, shown
from tests.bench.options import options
from tests.serve.store_jobs import add

_OWNERS = 20
_JOB = {"prompt": "a sentence of eighty letters " * 3}
# As large as a real one.
_METADATA = {"file_sha256": "0" * 64, "conditions": "x" * 1500}
_ABOUT = {"ranks": 8, "free": 0, "claims": 1, "sizes": ["1024x576"], "weights": "0" * 64}


class Counted(psycopg.Connection[Any]):
    """A connection that counts the statements of all."""

    number = 0

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        Counted.number += 1
        return super().execute(*args, **kwargs)


class Simulation:
    """Servers that share the connections of one thread, and the seconds that each answer took."""

    def __init__(self, queue: JobQueue, number: int, all_servers: int, hold: float) -> None:
        self._queues = [_server(queue) for _ in range(number)]
        self._all, self._hold = all_servers, hold
        self._jobs: list[Job | None] = [None] * number
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self, end: float) -> None:
        now, turn = time.monotonic(), fleet._MAX_SECONDS
        numbers = range(len(self._queues))
        events = [(now + random.random() * self._hold, number, False) for number in numbers]
        events += [(now + random.random() * turn, number, True) for number in numbers]
        heapq.heapify(events)
        while events[0][0] < end and time.monotonic() < end:
            due, number, is_turn = events[0]
            time.sleep(max(0.0, due - time.monotonic()))
            self.seconds["late"].append(time.monotonic() - due)
            (self._turn if is_turn else self._clip)(number)
            heapq.heapreplace(events, (due + (turn if is_turn else self._hold), number, is_turn))

    def _clip(self, number: int) -> None:
        queue = self._queues[number]
        if (job := self._jobs[number]) is not None:
            self._timed("complete", lambda: queue.complete(job.id, _METADATA, job.token))
            owner = f"owner{random.randrange(_OWNERS)}"
            self._timed(
                "request",
                lambda: add(queue, owner=owner, created_at=time.time(), model="svd", **_JOB),
            )
        self._jobs[number] = self._timed("claim", queue.take_next)

    def _turn(self, number: int) -> None:
        queue = self._queues[number]
        self._timed("renew", lambda: queue.renew(lambda _: 1))
        self._timed("register", lambda: queue.register(_ABOUT))
        if random.random() * self._all < fleet._MAX_LOOKING:
            self._timed("look", lambda: (queue.servers(), queue.recover()))

    def _timed(self, name: str, what: Any) -> Any:
        begin = time.perf_counter()
        answer = what()
        self.seconds[name].append(time.perf_counter() - begin)
        return answer


def _server(queue: JobQueue) -> JobQueue:
    """One more server by the same connections."""
    other = copy.copy(queue)
    other.server = secrets.token_hex(8)
    other._claims, other._passed = set(), other._passed.copy()
    return other


def main() -> None:
    asked = options(
        __doc__, servers=1000, rate=116.0, queued=10_000, threads=16, listeners=0, seconds=60.0
    )
    psycopg.connect = Counted.connect  # type: ignore[assignment]
    connections = asked.listeners + 2 * asked.threads + 10
    sizes = asked.threads, asked.queued, _OWNERS
    with (
        fleet_queues(*sizes, connections=connections, **_JOB) as (url, queues),
        ExitStack() as opened,
    ):
        for _ in range(asked.listeners):
            listener = opened.enter_context(psycopg.connect(url, autocommit=True))
            listener.execute("LISTEN svdpp")
        _measure(queues, asked.servers, asked.servers / asked.rate, asked.seconds)


def _measure(queues: list[JobQueue], servers: int, hold: float, seconds: float) -> None:
    parts = [
        Simulation(queue, len(range(index, servers, len(queues))), servers, hold)
        for index, queue in enumerate(queues)
    ]
    end = time.monotonic() + hold + seconds
    threads = [threading.Thread(target=part.run, args=(end,)) for part in parts]
    for thread in threads:
        thread.start()
    time.sleep(hold)  # until each server has a clip
    for part in parts:
        part.seconds = defaultdict(list)
    before, first = _size(queues[0]), Counted.number
    for thread in threads:
        thread.join()
    statements, after = Counted.number - first, _size(queues[0])
    found: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, each in part.seconds.items():
            found[name] += each
    clips = len(found["claim"])
    print(f"{servers} servers by {len(queues)} threads: {clips / seconds:.0f} clips a second")
    print(f"{statements / clips:.1f} statements a clip, {statements / seconds:.0f} a second")
    wal, rows, table = (now - then for now, then in zip(after, before, strict=True))
    print(
        f"a clip: {wal / clips:.0f} bytes of WAL, {table / max(1, rows):.0f} of tables and indexes"
    )
    for name, each in found.items():
        print(f"{name}: {len(each) / seconds:.1f} a second, {shown(each)}")


def _size(queue: JobQueue) -> list[int]:
    """Bytes of WAL ever written, rows, and bytes of tables and indexes."""
    wal = "pg_current_wal_lsn() - '0/0'"
    query = f"SELECT {wal}, (SELECT count(*) FROM jobs), pg_total_relation_size('jobs')"
    return [int(each) for each in queue.database.rows(query)[0]]


if __name__ == "__main__":
    main()
