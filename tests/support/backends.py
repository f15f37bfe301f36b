"""Real servers in temporary folders: PostgreSQL, and OpenStack Swift with an S3 API."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.ports import free_port
from tests.support.processes import wait_until

# --- PostgreSQL -----------------------------------------------------------------------------------

#: Folders with PostgreSQL's programs, the newest version last. Debian has a folder for each
#: version.
_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))


class Postgres:
    """Process of a PostgreSQL server. `url` is the URL of its database `postgres`."""

    def __init__(self, folder: Path, programs: Path, *, fsync: bool, connections: int) -> None:
        self.folder, self._programs = folder, programs
        self.log = folder / "log"
        self._settings = {"max_connections": connections, "fsync": "on" if fsync else "off"}
        self.port = free_port()
        self._run("initdb", "--username=svdpp", "--auth=trust", "--encoding=UTF8", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://svdpp@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1"
        options += "".join(f" -c {name}={value}" for name, value in self._settings.items())
        self._run("pg_ctl", "-w", "-t", "300", "-l", str(self.log), "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Run an SQL statement, even while the database is read-only."""
        import psycopg

        writes = "-c default_transaction_read_only=off"
        with psycopg.connect(self.url_of(database), autocommit=True, options=writes) as connection:
            connection.execute(statement.encode())

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Stop all processes of PostgreSQL during the block, so that it does not respond."""
        pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        main = psutil.Process(pid)
        processes = [main, *main.children(recursive=True)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._programs / program), "-D", str(self.folder / "data"), *arguments],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            user=_user(),
            cwd="/",
        )


def _user() -> str | None:
    """Return the system user to run PostgreSQL as, because it refuses to run as root.

    None means the current user.
    """
    if os.getuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"


@contextlib.contextmanager
def postgres_server(*, fsync: bool = False, connections: int = 300) -> Iterator[Postgres]:
    """Yield a new PostgreSQL server in a temporary folder; skip the test if it is not installed.

    Without `fsync`, a crash of the machine can lose committed changes; a crash of the server
    cannot.
    """
    pytest.importorskip("psycopg")
    found = shutil.which("initdb")
    programs = _FOLDERS[-1] if _FOLDERS else Path(found).parent if found else None
    if programs is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    # The folder is not below the tests' folders, because PostgreSQL's user cannot read those.
    with tempfile.TemporaryDirectory(prefix="svdpp-postgres-", dir="/tmp") as name:
        folder = Path(name)
        if (user := _user()) is not None:
            shutil.chown(folder, user)
        server = Postgres(folder, programs, fsync=fsync, connections=connections)
        try:
            yield server
        finally:
            # The call fails if a test has already stopped the server.
            with contextlib.suppress(subprocess.CalledProcessError):
                server.stop()


# --- Swift ----------------------------------------------------------------------------------------

_START_SECONDS = 300.0

_PARTS = ("account", "container", "object")
_CONFIG = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
[pipeline:main]
pipeline = {pipeline}
[app:{app}]
use = egg:swift#{part}
"""
_PIPELINE = "head catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth slo"
_PLAIN = ("catch_errors", "gatekeeper", "healthcheck", "listing_formats", "bulk", "slo")
_FILTERS = "account_autocreate = true\n" + "".join(
    f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in _PLAIN
)
_FILTERS += """
[filter:head]
paste.filter_factory = svdpp_head:factory
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_svdpp_tests = secret-of-tests .admin
"""
# Workaround for eventlet 0.33 of Debian 12. If the response to HEAD has no Content-Length, eventlet
# sends a final chunk after it, and the client reads the chunk as the beginning of the next
# response. So this filter adds a length.
_HEAD = """
def factory(*_, **__):
    def filter(app):
        def answer(env, start):
            def started(status, headers, *info):
                names = {name.lower() for name, _ in headers}
                if env["REQUEST_METHOD"] == "HEAD" and "content-length" not in names:
                    headers = [*headers, ("Content-Length", "0")]
                return start(status, headers, *info)
            return app(env, started)
        return answer
    return filter
"""


class Swift:
    """Swift server with an S3 API and one bucket. `url` is the URL of a folder in the bucket."""

    url = "s3://tests/fleet"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports = {part: free_port() for part in (*_PARTS, "proxy")}
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports['proxy']}",
            "AWS_ACCESS_KEY_ID": "svdpp:tests",
            "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        """Environment variables from which s3fs takes the server's address and credentials."""
        (folder / "devices" / "disk").mkdir(parents=True)
        (folder / "svdpp_head.py").write_text(_HEAD)
        for part in _PARTS:
            self._make_ring(part)
            self._configure(part, f"{part}-server", "")
        self._configure("proxy", f"{_PIPELINE} proxy-server", _FILTERS)
        self.start()

    def start(self) -> None:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(self._folder)}
        for part in self._ports:
            command = [f"swift-{part}-server", str(self._folder / f"{part}.conf")]
            with open(self._folder / f"{part}.log", "ab") as log:
                process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            self._processes.append(process)
        wait_until(self._answers, _START_SECONDS, self._logs)

    def stop(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            for port in self._ports.values():
                socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))

    def _make_ring(self, part: str) -> None:
        """Create Swift's ring file for `part`, with one device and one copy of each object."""
        device = f"r1z1-127.0.0.1:{self._ports[part]}/disk"
        builder = str(self._folder / f"{part}.builder")
        for arguments in (["create", "2", "1", "0"], ["add", device, "1"], ["rebalance"]):
            subprocess.run(
                ["swift-ring-builder", builder, *arguments], check=True, capture_output=True
            )

    def _configure(self, part: str, pipeline: str, more: str) -> None:
        text = _CONFIG.format(
            port=self._ports[part],
            user=subprocess.check_output(["id", "-un"], text=True).strip(),
            folder=self._folder,
            pipeline=pipeline,
            app=f"{part}-server",
            part=part,
        )
        (self._folder / f"{part}.conf").write_text(text + more)


@contextlib.contextmanager
def swift_server() -> Iterator[Swift]:
    """Yield a new OpenStack Swift server with an S3 API and an empty bucket."""
    s3fs = pytest.importorskip("s3fs")
    if shutil.which("swift-proxy-server") is None:
        pytest.skip(
            "needs OpenStack Swift: apt-get install swift-proxy swift-account swift-container "
            "swift-object"
        )
    with tempfile.TemporaryDirectory(prefix="svdpp-swift-", dir="/tmp") as name:
        try:
            os.setxattr(name, "user.svdpp", b"")
        except OSError:
            pytest.skip("needs a /tmp with extended attributes")
        server = Swift(Path(name))
        try:
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in server.environment.items():
                    patch.setenv(variable, value)
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir("tests")
            yield server
        finally:
            server.stop()
