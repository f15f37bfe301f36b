"""Server process of the soak test: start, injected faults, and restart."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from tests.support.ports import free_port
from tests.support.processes import MARK, command_line, marked, process_ids

# Value of `--timeout` in seconds. The server detects a stopped rank after 0.8 times this time.
_TIMEOUT = 12.0
_MODEL = "demo"
_OPTIONS = (
    *("--model", _MODEL, "--device", "cpu", "--world", "2", "--threads", "1"),
    *("--width", "64", "--height", "64", "--frames", "2", "--steps", "8"),
    *("--decode-chunk-size", "2", "--timeout", str(_TIMEOUT)),
)
_READY_SECONDS = 180.0
_DRAIN_SECONDS = 90.0
# Seconds within which all processes of a server must end after the server has ended. The time is
# long, because a fork server notices the end of its server only after it has loaded libtorch.
_ORPHAN_SECONDS = 30.0
_START_LINE = "--- start\n"
# Exit codes of a server that gets SIGTERM before Python or the command has installed a handler.
_ENDS_AT_START = (-signal.SIGTERM, 128 + signal.SIGTERM)
_FORK_SERVER = "multiprocessing.forkserver"
# Folder of the `sitecustomize` module that shifts the clock.
_SITE = Path(__file__).parent / "clock"
# Error messages with which a server may end while it starts. They mean that the database or the
# files cannot be reached at that moment.
_AWAY_AT_START = ("does not answer", "does not belong to the queue", "cannot use the data folder")


class FaultyServer:
    """Process of `svdpp serve` on a fixed port, with methods that inject faults."""

    def __init__(
        self,
        folder: Path,
        chance: random.Random,
        *options: str,
        data: Path,
        has_clock: bool = False,
    ) -> None:
        """Start the server of the soak test.

        With `has_clock`, `set_clock` can shift the server's clock. Otherwise the server uses the
        machine's clock.
        """
        self.data, self.temporary = data, folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._has_clock, self._clock = has_clock, folder / "clock"
        self._folder, self._options = folder, options
        self.log = folder / "server.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.starts = 0
        self.problems: list[str] = []
        """Detected problems: processes that outlived the server, ranks that were late, and exits
        that no fault explains."""
        self._chance = chance
        # The folder identifies the processes of this soak, because other soaks may run at the same
        # time.
        self._mark = str(folder)
        self._client = httpx.Client(base_url=self.url, timeout=5.0, trust_env=False)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        command = [sys.executable, "-m", "svdpp", "serve", "--data", str(self.data)]
        environment = {**os.environ, MARK: self._mark, "TMPDIR": str(self.temporary)}
        if self._has_clock:
            self.set_clock(0)  # with a shifted clock, the server would remove clips as too old
            paths = (str(_SITE), os.environ.get("PYTHONPATH", ""))
            environment |= {
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "SVDPP_SOAK_CLOCK": str(self._clock),
            }
        with self.log.open("ab") as log:
            log.write(_START_LINE.encode())
            log.flush()
            return subprocess.Popen(
                [*command, "--port", str(self.port), *_OPTIONS, *self._options],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
            )

    @property
    def is_running(self) -> bool:
        """Whether the server's process has not ended."""
        return self._process.poll() is None

    def set_clock(self, days: float) -> None:
        """Set the clock of the server and its ranks `days` days ahead of the machine's clock."""
        replaced = self._clock.with_suffix(".new")
        replaced.write_text(f"{days * 86400:+.0f}\n")
        replaced.replace(self._clock)

    def signal(self, number: int) -> None:
        """Send a signal to the server's process, but not to its ranks."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the server's process, and start the server again."""
        self._process.kill()
        self._end("kill the server")
        self._process = self._start()

    def replace(self) -> None:
        """Drain the server by SIGTERM, and start a new server on the same port.

        The server may still be starting when it gets the signal.
        """
        if code := self._drained():
            self.problems.append(f"exit code {code} after SIGTERM")
        self._end("a drain")
        self._process = self._start()

    @property
    def restarts(self) -> int | None:
        """Number of times that the server's process has restarted its ranks; None if ranks are not
        ready.
        """
        try:
            answer = self._client.get("/health")
        except httpx.TransportError:
            return None
        return int(answer.json()["restarts"]) if answer.status_code == 200 else None

    @property
    def is_ready(self) -> bool:
        """Whether the server's ranks are ready."""
        return self.restarts is not None

    def kill_a_rank(self) -> None:
        """Kill a random rank of the server; do nothing if no rank has been started yet."""
        self._signal_a_rank(signal.SIGKILL)

    def _signal_a_rank(self, number: int) -> None:
        if ranks := ranks_of(self._process.pid):
            _kill(self._chance.choice(ranks), number)

    def stop_a_rank(self) -> None:
        """Stop a random rank. Then wait until the server notices, or sometimes kill the server."""
        before, end = self.restarts, time.monotonic() + _READY_SECONDS
        if before is None:
            return
        self._signal_a_rank(signal.SIGSTOP)
        if self._chance.random() < 0.25:
            self.kill()
            return
        while self.is_running and self.restarts in (None, before):
            if time.monotonic() > end:
                self.problems.append("the server has not noticed that a rank is stopped")
                return
            time.sleep(0.1)

    def kill_the_fork_server(self) -> None:
        """Kill the server's fork server, and sometimes a rank at the same time."""
        ranks, fork_server = ranks_of(self._process.pid), fork_server_of(self._process.pid)
        if fork_server is not None and self.is_ready:
            _kill(fork_server, signal.SIGKILL)
            for rank in ranks[: self._chance.randrange(2)]:
                _kill(rank, signal.SIGKILL)

    def wait_ready(self) -> bool:
        """Wait until the server's ranks are ready, and start the server again if it has ended.

        Return False if the ranks do not become ready in time.
        """
        begun = time.monotonic()
        while not self.is_ready:
            if self._process.poll() is not None:
                self._note_end()
            if time.monotonic() - begun > _READY_SECONDS:
                self.problems.append(f"not ready after {_READY_SECONDS:g} s")
                return False
            time.sleep(0.1)
        return True

    def _note_end(self) -> None:
        log = self._log_of_start()
        if _has_listened(log) or not any(reason in log for reason in _AWAY_AT_START):
            tail = log.strip().splitlines()[-1:]
            self.problems.append(f"exit code {self._process.returncode}: {tail}")
        self._end("an end without a signal")
        self._process = self._start()

    def _end(self, what: str) -> None:
        """Wait until the server and its processes have ended; report and kill leftover
        processes."""
        self._process.wait()
        end = time.monotonic() + _ORPHAN_SECONDS
        while (left := processes_of(self._mark, self._folder)) and time.monotonic() < end:
            time.sleep(0.05)
        self.problems += [f"left after {what}: {command_line(pid)[:200]}" for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> int:
        """End the server by SIGTERM, as an administrator does; return its exit code."""
        code = self._drained()
        self._end("the last end")
        self._client.close()
        return code

    def _drained(self) -> int:
        """Send the server a SIGTERM, wait for its end, and return the exit code.

        Return 0 if the server ended before it had begun to listen.
        """
        self._process.terminate()
        try:
            code = self._process.wait(_DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        is_at_start = code in _ENDS_AT_START and not _has_listened(self._log_of_start())
        return 0 if is_at_start else code

    def _log_of_start(self) -> str:
        """Return the log that the server has written since its last start."""
        return self.log.read_text(errors="replace").rpartition(_START_LINE)[2]


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process may have ended meanwhile
        os.kill(pid, number)


def _has_listened(log: str) -> bool:
    return f"starting {_MODEL} at http" in log


# --- processes of a server ------------------------------------------------------------------------


def fork_server_of(server: int) -> int | None:
    """Return the process id of a server's fork server; None if there is none."""
    return next((pid for pid in _children(server) if _FORK_SERVER in command_line(pid)), None)


def ranks_of(server: int) -> list[int]:
    """Return the process ids of a server's ranks, which are children of its fork server."""
    fork_server = fork_server_of(server)
    return [] if fork_server is None else _children(fork_server)


def _children(pid: int) -> list[int]:
    """Return the ids of a process's child processes that have not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children() if command_line(child.pid)]
    return []


def processes_of(mark: str, folder: Path) -> list[int]:
    """Return the ids of all processes of a server.

    A process belongs to the server if `mark` is in its environment or a file of `folder` is among
    its arguments. The processes that decode uploads are found by their arguments, because they do
    not inherit the environment.
    """
    found = {*marked(mark), *(pid for pid in process_ids() if str(folder) in command_line(pid))}
    return sorted(found - {os.getpid()})
