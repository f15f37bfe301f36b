"""A real PostgreSQL server in a temporary folder, run by an ordinary user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Debian keeps the programs of each version in a folder of its own.
_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))


class Postgres:
    """A database server; `url` is of its database `postgres`."""

    def __init__(self, folder: Path, programs: Path, *, fsync: bool, connections: int) -> None:
        self._folder, self._programs = folder, programs
        self.log = folder / "log"
        self._settings = {"max_connections": connections, "fsync": "on" if fsync else "off"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._run("initdb", "--username=svdpp", "--auth=trust", "--encoding=UTF8", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://svdpp@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        options = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1"
        options += "".join(f" -c {name}={value}" for name, value in self._settings.items())
        self._run("pg_ctl", "-w", "-t", "300", "-l", str(self.log), "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def execute(self, statement: str, database: str = "postgres") -> None:
        import psycopg

        with psycopg.connect(self.url_of(database), autocommit=True) as connection:
            connection.execute(statement.encode())

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._programs / program), "-D", str(self._folder / "data"), *arguments],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            user=_user(),
            cwd="/",
        )


def _user() -> str | None:
    """PostgreSQL refuses to be run by root."""
    if os.getuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"


@contextlib.contextmanager
def postgres_server(*, fsync: bool = False, connections: int = 300) -> Iterator[Postgres]:
    """A new server; without `fsync`, only the end of the machine loses what it has committed."""
    pytest.importorskip("psycopg")
    found = shutil.which("initdb")
    programs = _FOLDERS[-1] if _FOLDERS else Path(found).parent if found else None
    if programs is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    # Not a folder of the tests, which other users may not read.
    with tempfile.TemporaryDirectory(prefix="svdpp-postgres-", dir="/tmp") as name:
        folder = Path(name)
        if (user := _user()) is not None:
            shutil.chown(folder, user)
        server = Postgres(folder, programs, fsync=fsync, connections=connections)
        try:
            yield server
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):  # a test has stopped it
                server.stop()
