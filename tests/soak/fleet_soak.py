"""Kills and stops servers of a fleet, their ranks and their database while clients use them.

    make soak-fleet        or        python -m tests.soak.fleet_soak [--jobs 300] [--faults 40]

Three servers of two CPU ranks each share a PostgreSQL database in a temporary folder. Clients
request small clips of the demo model, each time at any server. Meanwhile servers are killed,
stopped for longer than a lease, or drained and replaced by new ones; ranks are killed; the database
is stopped or restarted, or its connections are ended. At the end every job must have ended once,
every latent must be that of a pipeline without faults, and no row, file or process may be left. The
summary is one line of JSON on stdout; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import random
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

_SERVERS = 3
_LEASE = 6.0
_SECONDS_BETWEEN = 5.0
# About as long as a fault takes until most servers are ready for the next one.
_SECONDS_OF_FAULT = 12.0
# For what takes long only if it hangs.
_HANG_SECONDS = 300.0
_SECONDS_OF_JOB = 30.0
_OWN = {"queue.id"}
_END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'svdpp'"


class AnyServer(httpx.HTTPTransport):
    """Sends each request to any of several ports."""

    def __init__(self, ports: list[int], chance: random.Random) -> None:
        super().__init__()
        self._ports, self._chance = ports, chance

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=self._chance.choice(self._ports))
        return super().handle_request(request)


class FaultyFleet:
    """Servers over one database, and what is done to them."""

    def __init__(self, folder: Path, database: Postgres, chance: random.Random) -> None:
        self.data = folder / "data"
        self._folder, self._database, self._chance = folder, database, chance
        options = "--queue", database.url, "--lease", str(_LEASE), "--grace", "10"
        self.servers = [
            FaultyServer(folder / f"server{n}", chance, bool, *options, data=self.data)
            for n in range(_SERVERS)
        ]
        self.faults: Counter[str] = Counter()
        self._inflicts: dict[str, Callable[[FaultyServer], object]] = {
            "kill a server": FaultyServer.kill,
            "stop a server": self._stop_server,
            "drain a server": FaultyServer.replace,
            "kill a rank": lambda server: server.inflict("kill a rank"),
            "stop the database": self._stop_database,
            "restart the database": lambda _: self._restart_database(),
            "end the connections": lambda _: database.execute(_END),
            "end some connections": lambda _: database.execute(f"{_END} AND random() < 0.4"),
        }

    def fault(self) -> None:
        """One fault, once most of the servers are ready again."""
        _wait(lambda: sum(self._is_ready(server) for server in self.servers) > _SERVERS // 2)
        time.sleep(self._chance.uniform(0.2, 1.8) * _SECONDS_BETWEEN)
        # Each as often as the others.
        least = min(self.faults[what] for what in self._inflicts)
        what = self._chance.choice([w for w in self._inflicts if self.faults[w] == least])
        self.faults[what] += 1
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
        self._inflicts[what](self._chance.choice(self.servers))

    @staticmethod
    def _is_ready(server: FaultyServer) -> bool:
        return server.restarts is not None or (not server.is_running and server.wait_ready())

    def are_ready(self) -> bool:
        """Whether all servers are; one that has ended is started again."""
        return all(self._is_ready(server) for server in self.servers)

    def _stop_server(self, server: FaultyServer) -> None:
        """Sometimes it is killed before it goes on."""
        server.signal(signal.SIGSTOP)
        time.sleep(_LEASE * self._chance.uniform(1.2, 2.0))
        if self._chance.random() < 0.25:
            self.faults["kill a stopped server"] += 1
            server.kill()
        else:
            server.signal(signal.SIGCONT)

    def _stop_database(self, _: FaultyServer) -> None:
        self._database.stop()
        time.sleep(self._chance.choice((0.0, 2.0, 1.5 * _LEASE)))
        self._database.start()

    def _restart_database(self) -> None:
        self._database.stop("fast")
        self._database.start()

    def rows(self) -> list[Row]:
        """All jobs."""
        import psycopg

        return rows_of(psycopg.connect(self._database.url))

    def wrong_files(self, *temporary: Path) -> list[str]:
        """What `serve_checks.wrong_files` finds after what servers remove in an hour."""
        remove_leftovers_now(self.data, self._database.url)
        return wrong_files(self.data, self.rows(), _OWN, *temporary)

    def close(self) -> list[str]:
        """Ends all servers as an administrator does; what is wrong with that."""
        with ThreadPoolExecutor(_SERVERS) as threads:
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
    with postgres_server() as database:
        fleet = FaultyFleet(folder, database, chance)
        try:
            _wait(lambda: all(server.restarts is not None for server in fleet.servers))
            clients = Clients(
                fleet.servers[0].url,
                wanted,
                at_once=asked.clients,
                seconds=asked.faults * _SECONDS_OF_FAULT,
                chance=random.Random(asked.seed + 1),
                transport=AnyServer([server.port for server in fleet.servers], chance),
            )
            try:
                for _ in range(asked.faults):
                    fleet.fault()
                    print(f"{clients.num_done} done", file=sys.stderr, flush=True)
                end = time.monotonic() + _HANG_SECONDS + _SECONDS_OF_JOB * asked.jobs
                # At the end servers may still start, after the last fault.
                while not (fleet.are_ready() and clients.are_done) and time.monotonic() < end:
                    time.sleep(0.2)
            finally:
                clients.close()
            _wait(lambda: not fleet.wrong_files())
        finally:
            ends = fleet.close()
        wrong = {
            "files": fleet.wrong_files(*(server.temporary for server in fleet.servers)),
            "ends": ends,
            "logs": [
                f"{server.log}: a traceback"
                for server in fleet.servers
                if "Traceback" in server.log.read_text(errors="replace")
            ],
        }
        rows, faults = fleet.rows(), dict(fleet.faults)
        again = sum(row.token > 1 for row in rows)
        figures = {"faults": faults, "jobs_claimed_again": again}
        return summary(wanted, rows, fleet.data, fleet.servers, wrong, begun, **figures)


def main() -> int:
    """Runs the soak; returns its exit code."""
    asked = options(__doc__, jobs=300, clients=20, faults=40, seed=0)
    folder = Path(tempfile.mkdtemp(prefix="soak-fleet-"))
    return exit_code(soak(folder, asked), folder)


if __name__ == "__main__":
    sys.exit(main())
