"""Measure the time of a status request while many clients poll and follow clips in progress.

    python -m benchmarks.serve_load [--jobs 500] [--clients 200] [--interval 1]

The server makes clips of the dummy model, whose steps sleep. Half of the clients poll the status of
clips, each once in `--interval` seconds. The other half follow event streams until their clips end.
The benchmark prints one line of JSON. The time of a request includes the client's own CPU time, so
compare only runs on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.options import options
from tests.support.http_server import DUMMY, HttpServer
from tools.soak.serve_clients import photos

_SUBMITTERS = 8


@dataclass
class Load:
    """Clients that request, poll or follow clips of a server, in one event loop."""

    client: httpx.AsyncClient
    num_jobs: int
    interval: float
    to_request: list[int] = field(default_factory=list)
    open_ids: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_events: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def is_over(self) -> bool:
        return len(self.done) >= self.num_jobs or bool(self.wrong)

    async def submit(self) -> None:
        file = ("a.png", photos()[0], "image/png")
        while self.to_request:
            self.to_request.pop()
            answer = await self.client.post("/v1/videos", files={"input_reference": file})
            if answer.status_code == 202:
                self.open_ids.append(answer.json()["id"])
            else:
                self.wrong.append(f"request: {answer.status_code} {answer.text[:200]}")

    async def poll(self) -> None:
        await asyncio.sleep(self.chance.uniform(0, self.interval))
        while not self.is_over:
            begun = time.perf_counter()
            if id := self._pick():
                answer = await self.client.get(f"/v1/videos/{id}")
                self.seconds.append(time.perf_counter() - begun)
                self._note(id, answer.json().get("status"), ended=False)
            await asyncio.sleep(max(0.0, self.interval - (time.perf_counter() - begun)))

    async def follow(self) -> None:
        while not self.is_over:
            if not (id := self._pick()):
                await asyncio.sleep(0.2)
                continue
            last: dict[str, Any] = {}
            async with self.client.stream("GET", f"/v1/videos/{id}/events") as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        last = json.loads(line[6:])
                        self.num_events += 1
            self._note(id, last.get("status"), ended=True)

    def _pick(self) -> str:
        return self.chance.choice(self.open_ids) if self.open_ids else ""

    def _note(self, id: str, status: str | None, *, ended: bool) -> None:
        if status == "completed":
            self.done.add(id)
            if id in self.open_ids:
                self.open_ids.remove(id)
        elif ended or status not in ("queued", "in_progress"):
            self.wrong.append(f"{id}: {status}")


async def load(url: str, asked: argparse.Namespace) -> Load:
    """Run all clients of a server at the same time until all clips have ended; return them."""
    limits = httpx.Limits(max_connections=2 * asked.clients)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits) as client:
        state = Load(client, asked.jobs, asked.interval, list(range(asked.jobs)))
        tasks = [state.submit() for _ in range(_SUBMITTERS)]
        tasks += [state.poll() for _ in range(asked.clients // 2)]
        tasks += [state.follow() for _ in range(asked.clients - asked.clients // 2)]
        async with asyncio.timeout(asked.minutes * 60):
            await asyncio.gather(*tasks)
    return state


def main() -> None:
    clients = {"jobs": 500, "clients": 200, "minutes": 15.0, "interval": 1.0}
    asked = options(__doc__, **clients, time_scale=0.1)
    scale = ("--time-scale", str(asked.time_scale))
    with (
        tempfile.TemporaryDirectory(prefix="serve-load-") as folder,
        HttpServer(Path(folder) / "data", *DUMMY, *scale) as server,
    ):
        server.wait_ready()
        process, begun = psutil.Process(server.process.pid), time.monotonic()
        before = process.cpu_times()
        state = asyncio.run(load(server.url, asked))
        seconds, after = time.monotonic() - begun, process.cpu_times()
        restarts = server.client.get("/health").json()["restarts"]
        eta_error = server.client.get("/v1/engine").json()["eta_error"]
        rss = process.memory_info().rss
    percentiles = statistics.quantiles(state.seconds, n=100)
    figures = {
        "lost": asked.jobs - len(state.done),
        "wrong": state.wrong[:10],
        "restarts": restarts,
        "seconds": round(seconds, 1),
        "server_cpu_share": round((sum(after[:2]) - sum(before[:2])) / seconds, 2),
        "events": state.num_events,
        "calls": len(state.seconds),
        "status_ms": {p: round(1000 * percentiles[p - 1], 1) for p in (50, 90, 99)},
        "eta_error": eta_error,
        "rss_mib": round(rss / 2**20, 1),
        "load": [round(average, 1) for average in os.getloadavg()],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
