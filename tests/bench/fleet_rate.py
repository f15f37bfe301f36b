"""How many times as many clips three servers make as one does (docs/fleet.md).

    python -m tests.bench.fleet_rate [--seconds 60]

The servers share a database in a temporary folder. Each has two ranks of the dummy model, whose
steps sleep for 100 ms. First one server works on a long queue, then three do.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue, _insert
from tests.bench.options import options
from tests.serve.engines import SAMPLING, dummy_job
from tests.serve.http_server import DUMMY, HttpServer
from tests.serve.postgres import postgres_server

_SERVERS = 3
# 100 ms for each step.
_SCALE = "0.2"
_WARM_CLIPS = 6


def main() -> None:
    asked = options(__doc__, seconds=60.0, steps=20)
    sampling = replace(SAMPLING, num_inference_steps=asked.steps)
    with postgres_server(fsync=True) as database, ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "data"
        queue = opened.enter_context(closing(JobQueue(folder, url=database.url)))
        with queue.database.change() as statements:
            jobs = int(asked.seconds * 20)
            for seed in range(jobs):
                _insert(statements, dummy_job(seed, model="dummy", sampling=sampling))
        server_options = (*DUMMY, "--time-scale", _SCALE, "--queue", database.url)
        server_options += ("--max-queue", str(jobs + 1))  # else they are not ready
        servers: list[HttpServer] = []
        rates = {}
        for number in (1, _SERVERS):
            while len(servers) < number:
                servers.append(
                    opened.enter_context(HttpServer(folder, *server_options, "--grace", "0"))
                )
            for server in servers:
                server.wait_ready()
            rates[number] = _rate(queue, number, asked.seconds)
    figures = {
        "clips_a_second": {str(number): round(rate, 3) for number, rate in rates.items()},
        "ratio": round(rates[_SERVERS] / rates[1], 3),
        "load": [round(load, 1) for load in os.getloadavg()],
    }
    print(json.dumps(figures))


def _rate(queue: JobQueue, servers: int, seconds: float) -> float:
    """Clips a second, from the end of one clip to that of another one."""
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
    main()
