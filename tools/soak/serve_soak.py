"""Soak test of `svdpp serve`: kill and stop servers, ranks and fork servers at random, while
clients request clips.

    make soak-serve        or        python -m tools.soak.serve_soak [--jobs 300] [--faults 40]
    make soak-fleet        or        python -m tools.soak.serve_soak --servers 3
    python -m tools.soak.serve_soak --servers 3 --clocks 1 --storage 1 --database 1

Clients request small clips of the demo model over HTTP, with idempotency keys. Each request goes to
a random server. Some clients cancel or delete their clips. Meanwhile servers, ranks or fork servers
are killed, ranks are stopped, and servers are drained and replaced. With `--servers 3`, the servers
share a PostgreSQL database. Then a server is also stopped for longer than a lease, the database is
stopped or restarted, or its connections are closed. With `--clocks 1`, the clocks of servers jump
by days, and servers remove clips after a day. With `--storage 1`, the data folder is unavailable
for a while, as if its disk were not mounted. With `--database 1`, the database also hangs or
becomes read-only. At the end, every job must have ended exactly once, every latent must equal that
of a pipeline without faults, and no row, file or process may be left behind. The summary is one
line of JSON on stdout; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.options import options
from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SamplingConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.media.video import clip_sha256
from svdpp.serve.job import Job
from svdpp.serve.queue import JobQueue
from svdpp.serve.sqlite import RESERVE_FILE
from tests.support.backends import Postgres, postgres_server
from tests.support.engines import remove_leftovers_now
from tools.soak.serve_clients import Clients, Request, photos, random_requests
from tools.soak.serve_server import FaultyServer, processes_of

_LEASE = 6.0
_SECONDS_BETWEEN = 5.0
# Typical number of seconds from a fault until most servers are ready for the next fault.
_SECONDS_OF_FAULT = 12.0
# Probability that a fault waits until servers are ready. Other faults hit servers and ranks that
# are still starting.
_AFTER_START = 0.8
# Timeout in seconds for operations that take this long only if something hangs.
_HANG_SECONDS = 300.0
_SECONDS_OF_JOB = 30.0
_SHOWN = 20
_END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'svdpp'"


class AnyServer(httpx.HTTPTransport):
    """HTTP transport that sends each request to a random port, and so to a random server."""

    def __init__(self, ports: list[int], chance: random.Random) -> None:
        super().__init__()
        self._ports, self._chance = ports, chance

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=self._chance.choice(self._ports))
        return super().handle_request(request)


class FaultyServers:
    """One server, or several servers with a shared database, with methods that inject faults."""

    def __init__(
        self,
        folder: Path,
        asked: argparse.Namespace,
        database: Postgres | None,
        chance: random.Random,
    ) -> None:
        self.data = folder / "data"
        self._folder, self._database, self._chance = folder, database, chance
        self.faults: Counter[str] = Counter()
        self._inflicts: dict[str, Callable[[FaultyServer], object]] = {
            "kill a server": FaultyServer.kill,
            "drain a server": FaultyServer.replace,
            "kill a rank": FaultyServer.kill_a_rank,
            "stop a rank": FaultyServer.stop_a_rank,
            "kill a fork server": FaultyServer.kill_the_fork_server,
        }
        more: tuple[str, ...] = "--grace", "10"
        if database is not None:
            more += "--queue", database.url, "--lease", str(_LEASE)
            self._inflicts |= {
                "stop a server": self._stop_server,
                "stop the database": lambda _: self._stop_database(database),
                "restart the database": lambda _: (database.stop("fast"), database.start()),
                "end the connections": lambda _: database.execute(_END),
                "end some connections": lambda _: database.execute(f"{_END} AND random() < 0.4"),
            }
        if asked.clocks:
            more += "--keep-days", "1"
            self._inflicts["a clock jumps"] = self._jump
        if asked.storage:
            self._inflicts["the storage vanishes"] = lambda _: self._unmount()
        if asked.database and database is not None:
            self._inflicts |= {
                "the database hangs": lambda _: self._hang_database(database),
                "the database is read-only": lambda _: self._make_read_only(database),
            }
        self.servers = [
            FaultyServer(
                folder / f"server{n}", chance, *more, data=self.data, has_clock=asked.clocks > 0
            )
            for n in range(asked.servers)
        ]

    def fault(self) -> None:
        """Inject one random fault, usually after more than half of the servers are ready again."""
        if self._chance.random() < _AFTER_START:
            _wait(lambda: 2 * sum(map(self._is_ready, self.servers)) > len(self.servers))
        time.sleep(self._chance.uniform(0.2, 1.8) * _SECONDS_BETWEEN)
        # The kind of fault is a random one of the kinds that have occurred least often so far.
        least = min(self.faults[what] for what in self._inflicts)
        what = self._chance.choice([w for w in self._inflicts if self.faults[w] == least])
        self.faults[what] += 1
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
        self._inflicts[what](self._chance.choice(self.servers))

    @staticmethod
    def _is_ready(server: FaultyServer) -> bool:
        return server.is_ready or (not server.is_running and server.wait_ready())

    def are_ready(self) -> bool:
        """Restart servers that have ended; return whether all servers are ready."""
        return all(map(self._is_ready, self.servers))

    def _stop_server(self, server: FaultyServer) -> None:
        """Stop a server for longer than a lease, then continue it, or sometimes kill it."""
        server.signal(signal.SIGSTOP)
        time.sleep(_LEASE * self._chance.uniform(1.2, 2.0))
        if self._chance.random() < 0.25:
            self.faults["kill a stopped server"] += 1
            server.kill()
        else:
            server.signal(signal.SIGCONT)

    def _stop_database(self, database: Postgres) -> None:
        database.stop()
        time.sleep(self._chance.choice((0.0, 2.0, 1.5 * _LEASE)))
        database.start()

    def _jump(self, server: FaultyServer) -> None:
        """Make a server's clock jump by seconds to days, and sometimes correct it after a while.

        If the clock is not corrected here, the server's next start corrects it.
        """
        server.set_clock(self._chance.choice((-3.0, 0.1, 2.0, 400.0)))
        if self._chance.random() < 0.7:
            time.sleep(_LEASE * self._chance.uniform(0.5, 2.0))
            server.set_clock(0)

    def _unmount(self) -> None:
        """Replace the servers' data folder by an empty folder for a while.

        Without a database, the queue is a file in the data folder. A server that is starting would
        create a new queue in the empty folder, so all servers must be ready before the folder is
        replaced.
        """
        if self._database is None:
            _wait(self.are_ready)
        away = self.data.with_name("away")
        self.data.rename(away)
        self.data.mkdir()
        time.sleep(self._chance.choice((0.5, 4.0, 1.5 * _LEASE)))
        shutil.rmtree(self.data)
        away.rename(self.data)

    def _hang_database(self, database: Postgres) -> None:
        with database.hanging():
            time.sleep(self._chance.choice((2.0, 1.5 * _LEASE, 20.0)))

    def _make_read_only(self, database: Postgres) -> None:
        """Make the servers' database read-only for a while.

        The setting affects only new sessions, so most of the existing sessions are ended.
        """
        change = "ALTER DATABASE postgres SET default_transaction_read_only = {}"
        database.execute(change.format("on"))
        database.execute(f"{_END} AND random() < 0.7")
        time.sleep(self._chance.choice((1.0, 1.5 * _LEASE)))
        database.execute(change.format("off"))

    def jobs(self) -> list[Job]:
        """Return all jobs, after removing files without a job.

        A server would remove them by itself, at most two hours later.
        """
        url = None if self._database is None else self._database.url
        with contextlib.closing(JobQueue(self.data, url=url)) as queue:
            remove_leftovers_now(queue)
            return queue.page(owner="", limit=10**6)

    def wrong_files(self, *temporary: Path) -> list[str]:
        """Describe files without a job, missing files of jobs, and leftover temporary files."""
        jobs = self.jobs()
        expected = (
            {"queue.sqlite3", "lock", RESERVE_FILE} if self._database is None else {"queue.id"}
        )
        expected |= {f"photos/{job.input_file}" for job in jobs}
        for job in jobs:
            if job.state == "completed":
                clip = f"clips/{job.clip_path(self.data).name}"
                expected |= {clip, f"{clip}.json"}
        files = (path for path in self.data.rglob("*") if not path.is_dir())
        found = {str(path.relative_to(self.data)) for path in files}
        left = [f"left: {name}" for name in sorted(found - expected)]
        left += [f"missing: {name}" for name in sorted(expected - found)]
        return left + [f"temporary: {path}" for folder in temporary for path in folder.iterdir()]

    def close(self) -> list[str]:
        """End all servers by SIGTERM, as an administrator does; return descriptions of problems."""
        with ThreadPoolExecutor(len(self.servers)) as threads:
            codes = list(threads.map(FaultyServer.stop, self.servers))
        time.sleep(1.0)
        left = processes_of(self._folder.name, self._folder)
        return [f"exit codes {codes}"] * any(codes) + [f"process {pid} is left" for pid in left]


def _wait(happens: Callable[[], object], seconds: float = _HANG_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.2)


def soak(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the soak test of `svdpp serve` in `folder`; return its summary."""
    chance, begun = random.Random(asked.seed), time.monotonic()
    wanted = random_requests(asked.jobs, chance)
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(postgres_server()) if asked.servers > 1 else None
        faulty = FaultyServers(folder, asked, database, chance)
        try:
            _wait(faulty.are_ready)
            _use(faulty, wanted, asked, chance)
            if database is not None:
                _wait(lambda: not faulty.wrong_files())
        finally:
            ends = faulty.close()
        return _summary(wanted, faulty, ends, begun)


def _summary(
    wanted: list[Request], faulty: FaultyServers, ends: list[str], begun: float
) -> dict[str, Any]:
    jobs, servers = faulty.jobs(), faulty.servers
    done = [job for job in jobs if job.state == "completed"]
    wrong = {
        "jobs": _wrong_jobs(wanted, jobs),
        "failures": _unexplained_failures(jobs),
        "clips": _wrong_clips(wanted, faulty.data, done),
        "servers": [problem for server in servers for problem in server.problems],
        "files": faulty.wrong_files(*(server.temporary for server in servers)),
        "ends": ends,
        "logs": [
            f"{server.log}: a traceback"
            for server in servers
            if "Traceback" in server.log.read_text(errors="replace")
        ],
    }
    return {
        "jobs": len(wanted),
        "ended": dict(Counter(request.status or "open" for request in wanted)),
        "server_starts": sum(server.starts for server in servers),
        "client_retries": sum(request.retries for request in wanted),
        "clips_compared": len(done),
        "clips_resumed": sum(job.metadata.get("resumed_from_step", 0) > 0 for job in jobs),
        "faults": dict(faulty.faults),
        "jobs_begun_again": sum(job.fencing_token > 1 or job.attempts > 0 for job in jobs),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "load": [round(load, 1) for load in os.getloadavg()],
        "wrong": {name: found[:_SHOWN] for name, found in wrong.items() if found},
    }


def _use(
    faulty: FaultyServers, wanted: list[Request], asked: argparse.Namespace, chance: random.Random
) -> None:
    """Let clients request clips while faults are injected, until all clips have ended."""
    clients = Clients(
        faulty.servers[0].url,
        wanted,
        at_once=asked.clients,
        seconds=asked.faults * _SECONDS_OF_FAULT,
        chance=random.Random(asked.seed + 1),
        transport=AnyServer([server.port for server in faulty.servers], chance),
    )
    try:
        for _ in range(asked.faults):
            faulty.fault()
            print(f"{clients.num_done} done", file=sys.stderr, flush=True)
        end = time.monotonic() + _HANG_SECONDS + _SECONDS_OF_JOB * asked.jobs
        # Wait for servers that are still starting after the last fault.
        while not (faulty.are_ready() and clients.are_done) and time.monotonic() < end:
            time.sleep(0.2)
    finally:
        clients.close()


# --- checks at the end ----------------------------------------------------------------------------


def _wrong_jobs(asked: list[Request], jobs: list[Job]) -> list[str]:
    """Return descriptions of wrong jobs: lost, duplicated, ended twice, or in another state than
    the client saw.
    """
    wrong = [f"{job.id}: not ended" for job in jobs if job.finished_at is None]
    keys = Counter(job.idempotency_key for job in jobs)
    wrong += [f"{key}: {number} jobs" for key, number in keys.items() if number > 1]
    by_id = {job.id: job for job in jobs}
    for request in asked:
        job = by_id.pop(request.id, None)
        wrong += [f"{request.key}: {problem}" for problem in request.problems]
        if request.status == "deleted":
            if job is not None:
                wrong.append(f"{request.key}: exists, although it was deleted")
        elif not request.status:
            wrong.append(f"{request.key}: its client saw no final state")
        elif job is None:
            wrong.append(f"{request.key}: lost")
        elif job.state != request.status:
            wrong.append(f"{request.key}: {request.status}, later {job.state}")
        elif request.completed_at not in (None, int(job.finished_at or 0)):
            wrong.append(f"{request.key}: ended twice")
    return wrong + [f"{id}: no client asked for it" for id in by_id]


def _unexplained_failures(jobs: list[Job]) -> list[str]:
    """Return descriptions of failed jobs, except those whose ranks failed twice.

    A job may fail after its ranks have failed twice, because the server then gives up.
    """
    return [
        f"{job.idempotency_key}: {job.error}"
        for job in jobs
        if job.state == "failed"
        and "died 2 times during this clip" not in str((job.error or {}).get("message"))
    ]


def _wrong_clips(asked: list[Request], data: Path, done: list[Job]) -> list[str]:
    """Return descriptions of completed clips with a wrong latent, file or JSON."""
    by_id = {request.id: request for request in asked}
    expected = _reference([by_id[job.id] for job in done])
    wrong = []
    for job in done:
        request, path = by_id[job.id], job.clip_path(data)
        if job.metadata["latents_sha256"] != expected[_kind(request)]:
            wrong.append(f"{request.key}: wrong latents")
        if job.metadata["file_sha256"] != clip_sha256(path):
            wrong.append(f"{request.key}: wrong mp4")
        if job.metadata != json.loads(path.with_suffix(".mp4.json").read_bytes()):
            wrong.append(f"{request.key}: the row differs from the JSON of the clip")
    return wrong


def _kind(request: Request) -> tuple[int, ...]:
    return request.photo, *request.form.values()


def _reference(asked: list[Request]) -> dict[tuple[int, ...], str]:
    """Return the hash of the final latent of each different request, from a pipeline of one rank
    without faults.
    """
    kinds = {_kind(request): request for request in asked}
    config = PipelineConfig(
        world_size=1, model=ModelConfig(name="demo"), sampling=_sampling(8, 2), num_threads=1
    )
    with tempfile.TemporaryDirectory(prefix="soak-reference-") as name:
        paths = [Path(name) / f"{index}.png" for index in range(2)]
        for path, content in zip(paths, photos(), strict=True):
            path.write_bytes(content)
        requests = [
            ClipRequest(
                seed=request.form["seed"],
                image=str(paths[request.photo]),
                image_sha256=hashlib.sha256(paths[request.photo].read_bytes()).hexdigest(),
                sampling=_sampling(request.form["steps"], request.form["frames"]),
            )
            for request in kinds.values()
        ]
        with Pipeline(config) as pipeline:
            results = pipeline.run(requests)
    hashes = [result.metadata["latents_sha256"] for result in results]
    return dict(zip(kinds, hashes, strict=True))


def _sampling(steps: int, frames: int) -> SamplingConfig:
    return SvdSampling(
        num_inference_steps=steps,
        num_frames=frames,
        width=64,
        height=64,
        decode_chunk_size=2,
        max_guidance_scale=1.1,
        motion_bucket_id=40,
    )


def main() -> int:
    """Run the soak test of `svdpp serve`; return the exit code."""
    more = {"clocks": 0, "storage": 0, "database": 0}
    asked = options(__doc__, jobs=300, clients=20, faults=40, servers=1, seed=0, **more)
    folder = Path(tempfile.mkdtemp(prefix="soak-serve-"))
    found = soak(folder, asked)
    print(json.dumps(found))
    if found["wrong"]:
        print(f"its files: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
