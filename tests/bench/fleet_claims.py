"""How long a claim takes in PostgreSQL, with a long queue and many servers (docs/fleet.md).

    python -m tests.bench.fleet_claims --queued 10000 --servers 50 --rate 120

Starts a database in a temporary folder. Each simulated server claims and completes jobs; together
they do so `--rate` times a second.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from svdpp.serve.queue import JobQueue, _insert
from tests.bench.options import options
from tests.serve.postgres import postgres_server
from tests.serve.store_jobs import new_job


@contextmanager
def fleet_queues(
    number: int, queued: int, owners: int, *, connections: int = 300, **job: Any
) -> Iterator[tuple[str, list[JobQueue]]]:
    """A new database's URL, and servers' connections to it; so many jobs are queued in it."""
    with postgres_server(fsync=True, connections=connections) as server, ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "data"
        open_one = partial(JobQueue, folder, url=server.url)
        queues = [opened.enter_context(closing(open_one())) for _ in range(number)]
        for queue in queues:
            queue.kind = "svd"
        with queues[0].database.change() as database:
            for index in range(queued):
                _insert(database, new_job(model="svd", owner=f"owner{index % owners}", **job))
        server.execute("ANALYZE")
        yield server.url, queues


def main() -> None:
    asked = options(__doc__, queued=10_000, servers=50, owners=20, rate=120.0, seconds=30.0)
    with fleet_queues(asked.servers, asked.queued, asked.owners) as (_, queues):
        claims, completions = _measure(queues, asked.rate, asked.seconds)
        left = len(queues[0].waiting())
    print(f"{asked.servers} servers, {asked.queued} queued, {left} at the end")
    for name, seconds in (("claim", claims), ("complete", completions)):
        print(f"{name}: {len(seconds) / asked.seconds:.0f} a second, {shown(seconds)}")


def _measure(
    queues: list[JobQueue], rate: float, seconds: float
) -> tuple[list[float], list[float]]:
    """Seconds of each claim and each completion."""
    claims: list[float] = []
    completions: list[float] = []
    begin = threading.Barrier(len(queues))

    def serve(queue: JobQueue) -> None:
        for _ in range(5):  # PostgreSQL plans the first statements of each connection
            queue.take_next()
        begin.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(random.expovariate(rate / len(queues)))
            times = [time.perf_counter()]
            job = queue.take_next()
            times.append(time.perf_counter())
            assert job is not None, "the queue is empty: more --queued, or a lower --rate"
            queue.complete(job.id, {"file_sha256": "0" * 64}, job.token)
            times.append(time.perf_counter())
            claims.append(times[1] - times[0])
            completions.append(times[2] - times[1])

    threads = [threading.Thread(target=serve, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return claims, completions


def shown(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return ", ".join(f"p{percent} {1000 * cuts[percent - 1]:.1f} ms" for percent in (50, 90, 99))


if __name__ == "__main__":
    main()
