"""Measure the load that many servers put on one PostgreSQL, and the throughput of all servers
(docs/fleet.md).

    python -m benchmarks.fleet --servers 50 --threads 50 --rate 100 --requests 0
    python -m benchmarks.fleet --servers 1000 --rate 116
    python -m benchmarks.fleet --real 3

The benchmark starts a database in a temporary folder. Each simulated server claims a clip,
completes it after a delay, requests another clip (unless `--requests 0`), and renews its claim as
`svdpp.serve.fleet` does. The delay is chosen so that all servers together complete `--rate` clips a
second. A real server has three connections, but 3,000 connections need more memory than most
machines have. So the simulated servers share the connections of `--threads` threads, two for each
thread. `--listeners` further connections wait for notifications, as one connection of each real
server does.

`--real 3` starts three real servers, each with two ranks of the dummy model, whose steps sleep for
100 ms. The benchmark first counts the SQL statements of one idle server. Then it measures the
throughput with a long queue, for one server and for all servers.
"""

from __future__ import annotations

import argparse
import base64
import copy
import heapq
import json
import os
import random
import secrets
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.options import options
from svdpp.serve import fleet
from svdpp.serve.job import Job, JobState
from svdpp.serve.queue import JobQueue
from svdpp.serve.queue_sql import insert_job
from tests.support.backends import Postgres, postgres_server
from tests.support.engines import SAMPLING, add, dummy_job, new_job
from tests.support.http_server import DUMMY, HttpServer

_OWNERS = 20
_JOB = {"prompt": "a sentence of eighty letters " * 3}
# Metadata of a finished clip, as large as that of a real clip.
_METADATA = {"file_sha256": "0" * 64, "conditions": "x" * 1500}
_ABOUT = {"ranks": 8, "free": 0, "claims": 1, "sizes": ["1024x576"], "weights": "0" * 64}
_WARM_CLIPS = 6


class CountingConnection(psycopg.Connection[Any]):
    """Connection of psycopg that counts SQL statements. All connections share `number`."""

    number = 0

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        CountingConnection.number += 1
        return super().execute(*args, **kwargs)


class Simulation:
    """Simulated servers of a fleet that share the database connections of one thread.

    `seconds` has the durations of the calls to the queue, in seconds, by the kind of call.
    """

    def __init__(
        self, queue: JobQueue, number: int, all_servers: int, hold: float, *, requests: bool
    ) -> None:
        self._queues = [_server(queue) for _ in range(number)]
        self._all, self._hold, self._requests = all_servers, hold, requests
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
            self._timed("complete", lambda: queue.complete(job.id, _METADATA, job.fencing_token))
        if job is not None and self._requests:
            owner = f"owner{random.randrange(_OWNERS)}"
            self._timed(
                "request",
                lambda: add(queue, owner=owner, created_at=time.time(), model="svd", **_JOB),
            )
        self._jobs[number] = self._timed("claim", queue.claim)

    def _turn(self, number: int) -> None:
        queue = self._queues[number]
        self._timed("renew", lambda: queue.renew(lambda _: 1))
        self._timed("register", lambda: queue.register(_ABOUT))
        if random.random() * self._all < fleet._MAX_REFRESHING:
            self._timed("look", lambda: (queue.servers(), queue.requeue_expired()))

    def _timed(self, name: str, what: Any) -> Any:
        begin = time.perf_counter()
        answer = what()
        self.seconds[name].append(time.perf_counter() - begin)
        return answer


def _server(queue: JobQueue) -> JobQueue:
    """Return a job queue for one more simulated server, with the connections of `queue`."""
    other = copy.copy(queue)
    other.server = secrets.token_hex(8)
    other._claims, other._incompatible = set(), other._incompatible.copy()
    return other


@contextmanager
def _fleet_queues(
    number: int, queued: int, connections: int
) -> Iterator[tuple[str, list[JobQueue]]]:
    """Create a database with `queued` jobs; yield its URL and `number` job queues that use it."""
    with postgres_server(fsync=True, connections=connections) as server, ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "data"
        open_one = partial(JobQueue, folder, url=server.url)
        queues = [opened.enter_context(closing(open_one())) for _ in range(number)]
        for queue in queues:
            queue.model_key = "svd"
        with queues[0].backend.transaction() as connection:
            for index in range(queued):
                insert_job(
                    connection, new_job(model="svd", owner=f"owner{index % _OWNERS}", **_JOB)
                )
        server.execute("ANALYZE")
        yield server.url, queues


def _simulate(asked: argparse.Namespace) -> None:
    psycopg.connect = CountingConnection.connect  # type: ignore[assignment]
    connections = asked.listeners + 2 * asked.threads + 10
    with (
        _fleet_queues(asked.threads, asked.queued, connections) as (url, queues),
        ExitStack() as opened,
    ):
        for _ in range(asked.listeners):
            listener = opened.enter_context(psycopg.connect(url, autocommit=True))
            listener.execute("LISTEN svdpp")
        hold = asked.servers / asked.rate
        parts = [
            Simulation(
                queue,
                len(range(index, asked.servers, len(queues))),
                asked.servers,
                hold,
                requests=bool(asked.requests),
            )
            for index, queue in enumerate(queues)
        ]
        print(f"{asked.servers} servers by {len(queues)} threads")
        _measure(queues[0], parts, hold, asked.seconds)


def _measure(queue: JobQueue, parts: list[Simulation], hold: float, seconds: float) -> None:
    end = time.monotonic() + hold + seconds
    threads = [threading.Thread(target=part.run, args=(end,)) for part in parts]
    for thread in threads:
        thread.start()
    time.sleep(hold)  # wait until each server has claimed a clip
    for part in parts:
        part.seconds = defaultdict(list)
    before, first = _size(queue), CountingConnection.number
    for thread in threads:
        thread.join()
    statements, after = CountingConnection.number - first, _size(queue)
    found: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, each in part.seconds.items():
            found[name] += each
    clips = len(found["claim"])
    print(f"{clips / seconds:.0f} clips a second")
    print(f"{statements / clips:.1f} statements a clip, {statements / seconds:.0f} a second")
    wal, table = ((now - then) / clips for now, then in zip(after, before, strict=True))
    print(f"bytes for each clip: {wal:.0f} of WAL, {table:.0f} of tables and indexes")
    for name, each in found.items():
        cuts = statistics.quantiles(each, n=100)
        shown = ", ".join(f"p{part} {1000 * cuts[part - 1]:.1f} ms" for part in (50, 90, 99))
        print(f"{name}: {len(each) / seconds:.1f} a second, {shown}")


def _size(queue: JobQueue) -> list[int]:
    """Return a database's bytes of WAL so far, and bytes of its job table with indexes."""
    query = "SELECT pg_current_wal_lsn() - '0/0', pg_total_relation_size('jobs')"
    return [int(each) for each in queue.backend.fetch_all(query)[0]]


def _run_servers(asked: argparse.Namespace) -> None:
    sampling = replace(SAMPLING, num_inference_steps=20)
    with postgres_server(fsync=True) as database, ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "data"
        queue = opened.enter_context(closing(JobQueue(folder, url=database.url)))
        jobs = int(asked.seconds * 20)
        server_options = (*DUMMY, "--time-scale", "0.2", "--queue", database.url, "--grace", "0")
        # The queue must have room for one more job, because a server with a full queue does not
        # report that it is ready.
        server_options += ("--max-queue", str(jobs + 1))
        secret = folder.parent / "secret"
        secret.touch(0o600)
        secret.write_text("whsec_" + base64.b64encode(bytes(32)).decode())
        server_options += ("--callback-hosts", "localhost", "--callback-secret-file", str(secret))

        def start_server() -> None:
            opened.enter_context(HttpServer(folder, *server_options)).wait_ready()

        start_server()
        idle = _statements(database, asked.seconds) / asked.seconds
        with queue.backend.transaction() as connection:
            for seed in range(jobs):
                insert_job(connection, dummy_job(seed, model="dummy", sampling=sampling))
        alone = _rate(queue, 1, asked.seconds)
        for _ in range(1, asked.real):
            start_server()
        together = _rate(queue, asked.real, asked.seconds)
    figures = {
        "idle_statements_a_second": round(idle, 2),
        "clips_a_second": [round(alone, 3), round(together, 3)],
        "ratio": round(together / alone, 3),
        "load": [round(load, 1) for load in os.getloadavg()],
    }
    print(json.dumps(figures))


def _statements(database: Postgres, seconds: float) -> int:
    """Return the number of SQL statements that the database executes within `seconds`."""
    for value in ("all", "none"):
        database.execute(f"ALTER SYSTEM SET log_statement = '{value}'")
        database.execute("SELECT pg_reload_conf()")
        time.sleep(seconds if value == "all" else 1.0)
    log = database.log.read_text()
    return sum(log.count(f"LOG:  {kind}") for kind in ("statement: ", "execute "))


def _rate(queue: JobQueue, servers: int, seconds: float) -> float:
    """Return the clips that all servers complete per second, after a warm-up.

    The measured time starts and ends when a clip is completed. It lasts at least `seconds`.
    """
    warm = _completed(queue) + servers * _WARM_CLIPS
    while _completed(queue) < warm:
        time.sleep(0.02)
    first, begun = _completed(queue), time.monotonic()
    while time.monotonic() < begun + seconds:
        time.sleep(0.1)
    last = _completed(queue)
    while (now := _completed(queue)) == last:
        time.sleep(0.02)
    assert queue.counts()[JobState.QUEUED], "the queue is empty"
    return (now - first) / (time.monotonic() - begun)


def _completed(queue: JobQueue) -> int:
    return queue.counts()[JobState.COMPLETED]


if __name__ == "__main__":
    sizes = {"servers": 1000, "queued": 10_000, "threads": 16, "listeners": 0, "requests": 1}
    asked = options(__doc__, rate=116.0, seconds=60.0, real=0, **sizes)
    (_run_servers if asked.real else _simulate)(asked)
