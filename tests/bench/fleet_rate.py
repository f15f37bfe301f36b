"""How many times as many clips three servers make as one does, and what an idle one asks.

    python -m tests.bench.fleet_rate [--seconds 60]

The servers share a database in a temporary folder. Each has two ranks of the dummy model, whose
steps sleep for 100 ms. First one server has nothing to do, and its statements are counted in the
log of the database. Then it works on a long queue, then three do (docs/fleet.md).
"""

from __future__ import annotations

import base64
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
from tests.serve.postgres import Postgres, postgres_server

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
        jobs = int(asked.seconds * 20)
        server_options = (*DUMMY, "--time-scale", _SCALE, "--queue", database.url, "--grace", "0")
        server_options += ("--max-queue", str(jobs + 1))  # else they are not ready
        secret = folder.parent / "secret"
        secret.touch(0o600)
        secret.write_text("whsec_" + base64.b64encode(bytes(32)).decode())
        server_options += ("--callback-hosts", "localhost", "--callback-secret-file", str(secret))

        def start_server() -> None:
            opened.enter_context(HttpServer(folder, *server_options)).wait_ready()

        start_server()
        idle = _statements(database, asked.seconds) / asked.seconds
        with queue.database.change() as statements:
            for seed in range(jobs):
                _insert(statements, dummy_job(seed, model="dummy", sampling=sampling))
        rates = {1: _rate(queue, 1, asked.seconds)}
        for _ in range(1, _SERVERS):
            start_server()
        rates[_SERVERS] = _rate(queue, _SERVERS, asked.seconds)
    figures = {
        "idle_statements_a_second": round(idle, 2),
        "clips_a_second": {str(number): round(rate, 3) for number, rate in rates.items()},
        "ratio": round(rates[_SERVERS] / rates[1], 3),
        "load": [round(load, 1) for load in os.getloadavg()],
    }
    print(json.dumps(figures))


def _statements(database: Postgres, seconds: float) -> int:
    """How many statements the database gets in that time, of all kinds."""
    for value in ("all", "none"):
        database.execute(f"ALTER SYSTEM SET log_statement = '{value}'")
        database.execute("SELECT pg_reload_conf()")
        time.sleep(seconds if value == "all" else 1.0)
    log = database.log.read_text()
    return sum(log.count(f"LOG:  {kind}") for kind in ("statement: ", "execute "))


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
