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
import json
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from svdpp.serve.database import RESERVE
from tests.soak.serve_checks import (
    rows_of,
    unexplained_failures,
    wrong_clips,
    wrong_files,
    wrong_rows,
)
from tests.soak.serve_clients import Clients, Request, arguments, requests
from tests.soak.serve_server import FaultyServer

_OWN = {"queue.sqlite3", "lock", RESERVE}
_SHOWN = 20


def main() -> int:
    """Runs the soak; returns its exit code."""
    parser = arguments(__doc__, jobs=300, clients=24, minutes=20.0)
    parser.add_argument("--seconds-between", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-serve-"))
    summary = soak(folder, asked)
    print(json.dumps(summary))
    if not asked.keep and summary["passed"]:
        shutil.rmtree(folder)
    else:
        print(f"its files: {folder}", file=sys.stderr)
    return int(not summary["passed"])


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
        exit_code = server.stop()
    served = time.monotonic() - begun
    return _summary(server, wanted, exit_code, served, begun)


def _summary(
    server: FaultyServer, wanted: list[Request], exit_code: int, served: float, begun: float
) -> dict[str, Any]:
    rows, tally = rows_of(sqlite3.connect(server.data / "queue.sqlite3")), server.tally
    clips, num_compared = wrong_clips(wanted, server.data, rows)
    wrong = {
        "jobs": wrong_rows(wanted, rows),
        "failures": unexplained_failures(rows),
        "clips": clips,
        "files": wrong_files(server.data, rows, _OWN, server.temporary),
        "orphans": tally.orphans,
        "not_ready": tally.unready,
        "ends": [*tally.unasked, *([f"exit code {exit_code}"] if exit_code else [])],
    }
    resumed = sum(row.metadata.get("resumed_from_step", 0) > 0 for row in rows)
    return {
        "jobs": len(wanted),
        "ended": dict(Counter(request.status or "open" for request in wanted)),
        "faults": dict(tally.faults),
        "server_starts": tally.starts,
        "client_retries": sum(request.retries for request in wanted),
        "clips_compared": num_compared,
        "clips_resumed": resumed,
        "clips_with_an_attempt": sum(row.attempts > 0 for row in rows),
        "slowest_ready_seconds": round(tally.slowest_start, 1),
        "minutes_served": round(served / 60, 1),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "load": [round(load, 1) for load in os.getloadavg()],
        "wrong": {name: found[:_SHOWN] for name, found in wrong.items() if found},
        "passed": not any(wrong.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
