"""Kills and stops the parts of a server at random while clients use it, and counts what is lost.

    make soak-serve        or        python -m tests.soak.serve_soak [--jobs 300] [--minutes 20]

Clients request small clips of the demo model over HTTP, with idempotency keys. Some cancel theirs,
some delete them. Meanwhile the server, its ranks or its fork server are killed, or a rank is
stopped; a server that has ended is started again. At the end every job must have ended once, every
latent must be that of a pipeline without faults, and no process or file may be left. The summary is
one line of JSON on stdout; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from svdpp.serve.database import RESERVE
from tests.bench.options import options
from tests.soak.serve_checks import exit_code, remove_leftovers_now, rows_of, summary, wrong_files
from tests.soak.serve_clients import Clients, requests
from tests.soak.serve_server import FaultyServer

_OWN = {"queue.sqlite3", "lock", RESERVE}


def main() -> int:
    """Runs the soak; returns its exit code."""
    asked = options(__doc__, jobs=300, clients=24, minutes=20.0, seconds_between=5.0, seed=0)
    folder = Path(tempfile.mkdtemp(prefix="soak-serve-"))
    return exit_code(soak(folder, asked), folder)


def soak(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The summary of one soak in `folder`."""
    chance, begun = random.Random(asked.seed), time.monotonic()
    # The rest of the time is for the jobs that are left then, and for the reference.
    end = begun + 60 * asked.minutes * 0.65
    wanted = requests(asked.jobs, chance)
    clients: Clients | None = None

    def is_over() -> bool:
        return (clients is not None and clients.are_done) or time.monotonic() > end

    server = FaultyServer(folder, chance, is_over)
    clients = Clients(
        server.url,
        wanted,
        at_once=asked.clients,
        seconds=60 * asked.minutes * 0.5,
        chance=random.Random(asked.seed + 1),
    )
    try:
        while not is_over():
            server.fault_after(chance.uniform(0.2, 2.0) * asked.seconds_between)
            print(f"{time.monotonic() - begun:.0f} s: {clients.num_done} done", file=sys.stderr)
        server.wait_ready()
        while not clients.are_done and time.monotonic() < begun + 60 * asked.minutes * 0.85:
            time.sleep(0.2)
    finally:
        clients.close()
        code = server.stop()
    remove_leftovers_now(server.data)
    rows = rows_of(sqlite3.connect(server.data / "queue.sqlite3"))
    wrong = {
        "files": wrong_files(server.data, rows, _OWN, server.temporary),
        "ends": [f"exit code {code}"] * bool(code),
    }
    attempts = sum(row.attempts > 0 for row in rows)
    faults = dict(server.tally.faults)
    slowest = round(server.tally.slowest_start, 1)
    figures = {"faults": faults, "with_an_attempt": attempts, "slowest_ready_seconds": slowest}
    return summary(wanted, rows, server.data, [server], wrong, begun, **figures)


if __name__ == "__main__":
    sys.exit(main())
