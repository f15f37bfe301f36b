"""Measures the time of a status call while many clients poll and follow clips that are being made.

    python -m tests.bench.serve_load [--jobs 500] [--clients 200] [--interval 1] [--repeats 3]

The server makes clips of the dummy model, whose steps sleep. Half of the clients poll, each once in
an interval; the others follow event streams to their ends. Each run prints one line of JSON. A call
counts from its first byte sent to its last byte received. Three figures tell the server's share
from that of the clients and of the machine:

- `control`: between its calls each poller makes the same call to a process that answers fixed bytes
  of the same length. What that takes is not the server's.
- `server_p99_below`: the server's own histogram, from a request's head to the first byte of its
  answer.
- `loop_lag`: how late the clients' event loop wakes from a sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.serve.http_server import DUMMY, HttpServer
from tests.soak.serve_clients import arguments, photos
from tests.soak.serve_processes import cpu_seconds

_HOST = "127.0.0.1"
_BODY_BYTES = 700
_SUBMITTERS = 8
_LAG_SLEEP = 0.01
_ROUTE = 'svdpp_http_request_seconds_bucket{le="([^"]+)",route="/v1/videos/{id}"} ([0-9.e+]+)'


class Connection:
    """One HTTP connection that is kept open; as little work for each call as Python allows."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def call(
        self, method: str, path: str, body: bytes = b"", kind: str = ""
    ) -> tuple[int, bytes, float]:
        """Status, body and seconds of a call."""
        if self._writer is None or self._reader is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(_HOST, self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: {_HOST}\r\nContent-Length: {len(body)}\r\n"
        head += f"Content-Type: {kind}\r\n" if kind else ""
        begun = time.perf_counter()
        self._writer.write(head.encode() + b"\r\n" + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", answer)
        found = await self._reader.readexactly(int(length[1])) if length else b""
        return int(answer[9:12]), found, time.perf_counter() - begun

    async def lines(self, path: str) -> Any:
        """Yields the lines of a stream; closes the connection at its end."""
        self._reader, self._writer = await asyncio.open_connection(_HOST, self._port)
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: {_HOST}\r\n\r\n".encode())
        try:
            while line := await self._reader.readline():
                if line == b"0\r\n":  # the last chunk
                    return
                yield line
        finally:
            self.close()

    def close(self) -> None:
        """Closes the connection."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclass
class Load:
    """The clients of one run, in one event loop.

    Args:
        port: of the server.
        control: port of the control.
        interval: seconds between two calls of a poller.
    """

    port: int
    control: int
    interval: float
    num_jobs: int
    open_ids: dict[str, None] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    streamed: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_events: int = 0
    num_accepted: int = 0
    rss: dict[int, int] = field(default_factory=dict)
    _chance: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def is_over(self) -> bool:
        """Whether all jobs are done."""
        return len(self.done) >= self.num_jobs

    @property
    def _phase(self) -> str:
        return "submitting" if self.num_accepted < self.num_jobs else "submitted"

    async def submit(self, numbers: list[int]) -> None:
        """Requests clips until none is left to request."""
        connection, photo = Connection(self.port), photos()[0]
        while numbers and numbers.pop() is not None:
            body = (
                b"--x\r\nContent-Disposition: form-data; name=input_reference; filename=a.png\r\n"
            )
            body += b"Content-Type: image/png\r\n\r\n" + photo + b"\r\n--x--\r\n"
            kind = "multipart/form-data; boundary=x"
            status, answer, seconds = await connection.call("POST", "/v1/videos", body, kind)
            self.seconds["request"].append(seconds)
            self.num_accepted += 1
            if status == 202:
                self.open_ids[json.loads(answer)["id"]] = None
            else:
                self.wrong.append(f"request: {status} {answer[:200]!r}")
        connection.close()

    async def poll(self) -> None:
        """Asks for the status of clips, and as often the control."""
        connection, control = Connection(self.port), Connection(self.control)
        await asyncio.sleep(self._chance.uniform(0, self.interval))
        while not self.is_over:
            begun = time.perf_counter()
            if id := self._pick():
                status, answer, seconds = await connection.call("GET", f"/v1/videos/{id}")
                self.seconds[self._phase].append(seconds)
                self._note(id, status, answer)
            await asyncio.sleep(self.interval / 2)
            _, _, seconds = await control.call("GET", "/v1/videos/none")
            self.seconds["control"].append(seconds)
            passed = time.perf_counter() - begun
            await asyncio.sleep(max(0.0, self.interval - passed))
        connection.close()
        control.close()

    async def follow(self) -> None:
        """Follows one clip after the other to its end."""
        while not self.is_over:
            if not (id := self._pick()):
                await asyncio.sleep(0.2)
                continue
            last: dict[str, Any] = {}
            async for line in Connection(self.port).lines(f"/v1/videos/{id}/events"):
                if line.startswith(b"data: "):
                    last = json.loads(line[6:])
                    self.num_events += 1
            if last.get("status") != "completed":
                self.wrong.append(f"a stream of {id} ended with {last.get('status')}")
            self.streamed.add(id)
            self._end(id)

    async def watch(self, pid: int) -> None:
        """Asks for the state of the engine as the page does, and notes the server's memory."""
        connection = Connection(self.port)
        while not self.is_over:
            _, answer, seconds = await connection.call("GET", "/v1/engine")
            self.seconds["engine"].append(seconds)
            completed = json.loads(answer)["queue"]["completed"]
            for mark in (50, 250, self.num_jobs - 5):
                if completed >= mark:
                    self.rss.setdefault(mark, _resident(pid))
            await asyncio.sleep(1.0)
        self.rss[self.num_jobs] = _resident(pid)
        connection.close()

    async def measure_lag(self) -> None:
        """Measures how late the loop wakes."""
        while not self.is_over:
            begun = time.perf_counter()
            await asyncio.sleep(_LAG_SLEEP)
            self.seconds["loop_lag"].append(time.perf_counter() - begun - _LAG_SLEEP)

    def _pick(self) -> str:
        return self._chance.choice(list(self.open_ids)) if self.open_ids else ""

    def _note(self, id: str, status: int, answer: bytes) -> None:
        if status != 200:
            self.wrong.append(f"{id}: {status} {answer[:200]!r}")
            return
        state = json.loads(answer)["status"]
        if state == "completed":
            self._end(id)
        elif state not in ("queued", "in_progress"):
            self.wrong.append(f"{id}: {state}")

    def _end(self, id: str) -> None:
        self.open_ids.pop(id, None)
        self.done.add(id)


async def load(server: HttpServer, control: int, asked: argparse.Namespace) -> Load:
    """All clients at once, until all jobs are done."""
    port = int(server.url.rpartition(":")[2])
    state = Load(port, control, asked.interval, asked.jobs)
    numbers = list(range(asked.jobs))
    tasks = [state.watch(server.process.pid), state.measure_lag()]
    tasks += [state.submit(numbers) for _ in range(_SUBMITTERS)]
    tasks += [state.poll() for _ in range(asked.clients // 2)]
    tasks += [state.follow() for _ in range(asked.clients - asked.clients // 2)]
    async with asyncio.timeout(asked.minutes * 60):
        await asyncio.gather(*tasks)
    return state


def run(asked: argparse.Namespace, control: int) -> dict[str, Any]:
    """One run: a new server, its figures."""
    scale = ("--time-scale", str(asked.time_scale))
    with (
        tempfile.TemporaryDirectory(prefix="serve-load-") as folder,
        HttpServer(Path(folder) / "data", *DUMMY, *scale) as server,
    ):
        server.wait_ready()
        begun, cpu = time.monotonic(), cpu_seconds(server.process.pid)
        state = asyncio.run(load(server, control, asked))
        seconds = time.monotonic() - begun
        cpu = cpu_seconds(server.process.pid) - cpu
        completed = _all_completed(server)
        below = _server_p99(server.client.get("/metrics").text)
        restarts = server.client.get("/health").json()["restarts"]
    names = ("submitting", "submitted", "control", "loop_lag", "engine", "request")
    figures = {name: _milliseconds(state.seconds[name]) for name in names}
    status = state.seconds["submitting"] + state.seconds["submitted"]
    return {
        "jobs": asked.jobs,
        "lost": asked.jobs - len(completed & state.done),
        "wrong": state.wrong[:10],
        "restarts": restarts,
        "seconds": round(seconds, 1),
        "server_cpu_share": round(cpu / seconds, 2),
        "events": state.num_events,
        "status": _milliseconds(status),
        **figures,
        "server_p99_below_ms": below,
        "rss_mib": {mark: round(rss / 2**20, 1) for mark, rss in state.rss.items()},
        "load": [round(each, 1) for each in os.getloadavg()],
    }


def _all_completed(server: HttpServer) -> set[str]:
    found: set[str] = set()
    page: dict[str, Any] = {"has_more": True, "last_id": None}
    while page["has_more"]:
        after = {"after": page["last_id"]} if page["last_id"] else {}
        page = server.client.get("/v1/videos", params={"limit": 100, **after}).json()
        found |= {video["id"] for video in page["data"] if video["status"] == "completed"}
    return found


def _server_p99(metrics: str) -> float | None:
    """The bound in ms of the bucket in which the server's own p99 of a status call lies."""
    found = [(float(bound), float(count)) for bound, count in re.findall(_ROUTE, metrics)]
    total = found[-1][1] if found else 0.0
    return next((1000 * bound for bound, count in found if count >= 0.99 * total), None)


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"calls": 0}
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {
        "calls": len(ordered),
        **{name: round(1000 * ordered[round(part * last)], 1) for name, part in at.items()},
    }


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The control: fixed bytes for each request without a body."""
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {_BODY_BYTES}\r\n\r\n".encode()
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(answer + b"x" * _BODY_BYTES)


async def _control() -> None:
    server = await asyncio.start_server(_answer, _HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Prints one line for each run."""
    parser = arguments(__doc__, jobs=500, clients=200, minutes=15.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--time-scale", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.control:
        asyncio.run(_control())
        return
    command = [sys.executable, "-m", "tests.bench.serve_load", "--control"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as control:
        assert control.stdout is not None
        try:
            port = int(control.stdout.readline())
            for _ in range(asked.repeats):
                print(json.dumps(run(asked, port)), flush=True)
        finally:
            control.kill()


if __name__ == "__main__":
    main()
