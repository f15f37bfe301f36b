"""Measures the server's processor time for a status call while the ranks do nothing new.

    python -m tests.bench.status_cost [--calls 2000] [--waiting 20]

One step of the dummy model takes longer than the measurement, so the server only answers. Unlike a
time, its processor time hardly depends on what else the machine does. Prints one line of JSON, in
microseconds for each call: of a running, a waiting and an unknown clip, and of `/health`.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import httpx

from tests.bench.options import options
from tests.serve.http_server import DUMMY, HttpServer
from tests.soak.serve_server import cpu_seconds

_WARM_UP = 200


def _cost(client: httpx.Client, pid: int, path: str, calls: int) -> float:
    for _ in range(_WARM_UP):
        client.get(path)
    before = cpu_seconds(pid)
    for _ in range(calls):
        client.get(path)
    return round(1e6 * (cpu_seconds(pid) - before) / calls, 1)


def main() -> None:
    asked = options(__doc__, calls=2000, waiting=20)
    with (
        tempfile.TemporaryDirectory(prefix="status-cost-") as folder,
        HttpServer(Path(folder) / "data", *DUMMY, "--time-scale", "2000", "--grace", "0") as server,
    ):
        server.wait_ready()
        ids = server.add(asked.waiting)
        while server.video(ids[0])["status"] != "in_progress":
            time.sleep(0.1)
        paths = {
            "running": f"/v1/videos/{ids[0]}",
            "waiting": f"/v1/videos/{ids[-1]}",
            "unknown": "/v1/videos/video_none",
            "health": "/health",
        }
        pid = server.process.pid
        found = {n: _cost(server.client, pid, path, asked.calls) for n, path in paths.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
