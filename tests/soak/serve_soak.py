"""Kills and stops servers and their parts at random while clients use them; counts what is lost.

    make soak-serve        or        python -m tests.soak.serve_soak [--jobs 300] [--faults 40]
    make soak-fleet        or        python -m tests.soak.serve_soak --servers 3

Clients request small clips of the demo model over HTTP, with idempotency keys, each time at any
server. Some cancel theirs, some delete them. Meanwhile servers, their ranks or their fork servers
are killed, ranks are stopped, or a server is drained and replaced; of several servers, which share
a PostgreSQL database, one is stopped for longer than a lease, or the database is stopped or
restarted, or its connections are ended. At the end every job must have ended once, every latent
must be that of a pipeline without faults, and no row, file or process may be left. The summary is
one line of JSON on stdout; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from svdpp.serve.database import RESERVE
from tests.bench.options import options
from tests.serve.postgres import Postgres, postgres_server
from tests.soak.serve_checks import (
    Row,
    exit_code,
    remove_leftovers_now,
    rows_of,
    summary,
    wrong_files,
)
from tests.soak.serve_clients import Clients, requests
from tests.soak.serve_server import FaultyServer, belonging

_LEASE = 6.0
_SECONDS_BETWEEN = 5.0
# About as long as a fault takes until most servers are ready for the next one.
_SECONDS_OF_FAULT = 12.0
# How many faults wait for that; the others hit servers and ranks that are still starting.
_AFTER_START = 0.8
# For what takes long only if it hangs.
_HANG_SECONDS = 300.0
_SECONDS_OF_JOB = 30.0
_END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'svdpp'"


class AnyServer(httpx.HTTPTransport):
    """Sends each request to any of several ports."""

    def __init__(self, ports: list[int], chance: random.Random) -> None:
        super().__init__()
        self._ports, self._chance = ports, chance

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=self._chance.choice(self._ports))
        return super().handle_request(request)


class FaultyServers:
    """One server, or several over a database, and what is done to them."""

    def __init__(
        self, folder: Path, number: int, database: Postgres | None, chance: random.Random
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
                "restart the database": lambda _: self._restart(database),
                "end the connections": lambda _: database.execute(_END),
                "end some connections": lambda _: database.execute(f"{_END} AND random() < 0.4"),
            }
        self.servers = [
            FaultyServer(folder / f"server{n}", chance, *more, data=self.data)
            for n in range(number)
        ]

    def fault(self) -> None:
        """One fault, mostly once half of the servers are ready again."""
        if self._chance.random() < _AFTER_START:
            _wait(lambda: 2 * sum(map(self._is_ready, self.servers)) > len(self.servers))
        time.sleep(self._chance.uniform(0.2, 1.8) * _SECONDS_BETWEEN)
        # Each as often as the others.
        least = min(self.faults[what] for what in self._inflicts)
        what = self._chance.choice([w for w in self._inflicts if self.faults[w] == least])
        self.faults[what] += 1
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
        self._inflicts[what](self._chance.choice(self.servers))

    @staticmethod
    def _is_ready(server: FaultyServer) -> bool:
        return server.is_ready or (not server.is_running and server.wait_ready())

    def are_ready(self) -> bool:
        """Whether all servers are; one that has ended is started again."""
        return all(map(self._is_ready, self.servers))

    def _stop_server(self, server: FaultyServer) -> None:
        """Sometimes it is killed before it goes on."""
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

    @staticmethod
    def _restart(database: Postgres) -> None:
        database.stop("fast")
        database.start()

    def rows(self) -> list[Row]:
        """All jobs."""
        if self._database is None:
            return rows_of(sqlite3.connect(self.data / "queue.sqlite3"))
        import psycopg

        return rows_of(psycopg.connect(self._database.url))

    def wrong_files(self, *temporary: Path) -> list[str]:
        """What `serve_checks.wrong_files` finds after what servers remove in an hour."""
        own = {"queue.sqlite3", "lock", RESERVE} if self._database is None else {"queue.id"}
        remove_leftovers_now(self.data, None if self._database is None else self._database.url)
        return wrong_files(self.data, self.rows(), own, *temporary)

    def close(self) -> list[str]:
        """Ends all servers as an administrator does; what is wrong with that."""
        with ThreadPoolExecutor(len(self.servers)) as threads:
            codes = list(threads.map(FaultyServer.stop, self.servers))
        time.sleep(1.0)
        left = belonging(self._folder.name, self._folder)
        return [f"exit codes {codes}"] * any(codes) + [f"process {pid} is left" for pid in left]


def _wait(happens: Callable[[], object], seconds: float = _HANG_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.2)


def soak(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The summary of one soak in `folder`."""
    chance, begun = random.Random(asked.seed), time.monotonic()
    wanted = requests(asked.jobs, chance)
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(postgres_server()) if asked.servers > 1 else None
        faulty = FaultyServers(folder, asked.servers, database, chance)
        try:
            _wait(faulty.are_ready)
            _use(faulty, wanted, asked, chance)
            if database is not None:
                _wait(lambda: not faulty.wrong_files())
        finally:
            ends = faulty.close()
        wrong = {
            "files": faulty.wrong_files(*(server.temporary for server in faulty.servers)),
            "ends": ends,
            "logs": [
                f"{server.log}: a traceback"
                for server in faulty.servers
                if "Traceback" in server.log.read_text(errors="replace")
            ],
        }
        rows = faulty.rows()
        again = sum(row.token > 1 or row.attempts > 0 for row in rows)
        figures = {"faults": dict(faulty.faults), "jobs_begun_again": again}
        return summary(wanted, rows, faulty.data, faulty.servers, wrong, begun, **figures)


def _use(
    faulty: FaultyServers, wanted: list[Any], asked: argparse.Namespace, chance: random.Random
) -> None:
    """Clients request clips during the faults, and until all clips have ended."""
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
        # At the end servers may still start, after the last fault.
        while not (faulty.are_ready() and clients.are_done) and time.monotonic() < end:
            time.sleep(0.2)
    finally:
        clients.close()


def main() -> int:
    """Runs the soak; returns its exit code."""
    asked = options(__doc__, jobs=300, clients=20, faults=40, servers=1, seed=0)
    folder = Path(tempfile.mkdtemp(prefix="soak-serve-"))
    return exit_code(soak(folder, asked), folder)


if __name__ == "__main__":
    sys.exit(main())
