"""How long a claim takes in PostgreSQL, with a long queue and many servers (docs/fleet.md).

    python -m tests.bench.fleet_claims --queued 10000 --servers 50 --rate 120

Starts a database in a temporary folder. Each simulated server claims and completes jobs; together
they do so `--rate` times a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

from svdpp.serve.queue import JobQueue, _insert
from tests.serve.postgres import postgres_server
from tests.serve.store_jobs import new_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--servers", type=int, default=50)
    parser.add_argument("--owners", type=int, default=20)
    parser.add_argument("--rate", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    asked = parser.parse_args()
    with postgres_server(fsync=True) as server, ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "data"
        queues = [
            opened.enter_context(closing(JobQueue(folder, url=server.url)))
            for _ in range(asked.servers)
        ]
        for queue in queues:
            queue.kind = "svd"
        with queues[0].database.change() as database:
            for number in range(asked.queued):
                _insert(database, new_job(model="svd", owner=f"owner{number % asked.owners}"))
        server.execute("ANALYZE")
        claims, completions = _measure(queues, asked.rate, asked.seconds)
        left = len(queues[0].waiting())
    print(f"{asked.servers} servers, {asked.queued} queued, {left} at the end")
    for name, seconds in (("claim", claims), ("complete", completions)):
        print(f"{name}: {len(seconds) / asked.seconds:.0f} a second, {_shown(seconds)}")


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


def _shown(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return ", ".join(f"p{percent} {1000 * cuts[percent - 1]:.1f} ms" for percent in (50, 90, 99))


if __name__ == "__main__":
    main()
