"""Hosts of a cluster on one machine: network namespaces, each with a name, an address, a clock."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.cli.shell import ROOT
from tests.faults.processes import MARK, marked, wait_until

DEVICE = "eth0"
_STORE_PORT = 29_500
_END_SECONDS = 100.0


class NoHosts(Exception):
    """The reason why this machine cannot provide hosts."""


@dataclass
class Job:
    process: subprocess.Popen[bytes]
    files: dict[str, Path]

    @property
    def out(self) -> str:
        return self.files["out"].read_text()

    @property
    def err(self) -> str:
        return self.files["err"].read_text()

    def end(self, seconds: float = _END_SECONDS) -> int:
        """Waits for its end; returns its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {seconds} s:\n{self.err[-3000:]}") from None


@dataclass
class Host:
    """One host: a network namespace."""

    name: str
    namespace: str
    address: str
    index: int
    home: Path
    jobs: list[Job] = field(default_factory=list)

    def path(self, name: str) -> Path:
        return self.home / name

    def set_link(self, state: str) -> None:
        """Cuts its network link (`down`) or restores it (`up`)."""
        _ip("-n", self.namespace, "link", "set", DEVICE, state)

    def listening(self) -> dict[str, set[str]]:
        """By address, the names of all programs that listen on it."""
        said = _run("ip", "netns", "exec", self.namespace, "ss", "-ltnpH")
        found: dict[str, set[str]] = {}
        for line in said.splitlines():
            address = line.split()[3].rpartition(":")[0]
            found.setdefault(address, set()).update(re.findall(r'\("([^"]+)",', line))
        return found


class Hosts:
    """A network of hosts; created by `made`."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.all = hosts
        self.mark = uuid.uuid4().hex
        self._names = folder / "hosts"
        self.on_first_host = folder / "on-first-host"
        """A folder of the first host that is empty on all others."""
        self.on_first_host.mkdir()
        lines = [f"{host.address} {host.name}" for host in hosts]
        self._names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def __getitem__(self, index: int) -> Host:
        return self.all[index]

    def torchrun(
        self, *arguments: str, per_host: int, options: Sequence[str] = (), module: str = "svdpp"
    ) -> list[Job]:
        """Starts the command by torchrun on every host; `{host}` stands for the host's folder."""
        jobs = []
        for host in self.all:
            # Agents of the static rendezvous end with their ranks; those of c10d wait for a store
            # that they cannot reach (docs/cluster.md).
            launcher = (
                *("-m", "torch.distributed.run", "--nnodes", str(len(self.all))),
                *("--nproc-per-node", str(per_host), "--node-rank", str(host.index)),
                *("--log-dir", str(host.home)),  # the default is a temporary folder
                *("--master-addr", self[0].name, "--master-port", str(_STORE_PORT)),
                *(*options, "-m", module),
            )
            jobs.append(self.start(host, *launcher, *arguments))
        return jobs

    def start(self, host: Host, *arguments: str, **environment: str) -> Job:
        """Starts `python ARGUMENTS` on `host`."""
        number = len(host.jobs)
        files = {kind: host.path(f"{kind}{number}.txt") for kind in ("out", "err")}
        settings = {
            **os.environ,
            **{"PYTHONPATH": str(ROOT), MARK: self.mark, "GLOO_SOCKET_IFNAME": DEVICE},
            **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "TERM": "dumb"},
            **environment,
        }
        words = [word.replace("{host}", str(host.home)) for word in arguments]
        inside = f"hostname {host.name}; mount --bind {self._names} /etc/hosts; "
        if host.index:
            inside += f"mount -t tmpfs none {self.on_first_host}; "
        inside += 'exec "$@"'
        with files["out"].open("wb") as out, files["err"].open("wb") as err:
            process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", host.namespace, "unshare", "--uts", "--mount"),
                    # Each host's monotonic clock starts at a different value.
                    *("--time", "--monotonic", str((host.index + 1) * 100_000)),
                    *("--fork", "--kill-child", "sh", "-c", inside, "sh", sys.executable, *words),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=settings,
            )
        host.jobs.append(Job(process, files))
        return host.jobs[-1]

    def ranks(self) -> list[int]:
        return [pid for pid in marked(self.mark) if _variable(pid, "RANK") is not None]

    def rank(self, number: int) -> int:
        return next(pid for pid in self.ranks() if _variable(pid, "RANK") == str(number))

    def end_all(self) -> None:
        """Ends the processes that a failed test has left."""
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for host in self.all:
            for job in host.jobs:
                job.process.wait(10)


@contextlib.contextmanager
def made(num_hosts: int, folder: Path, *, delay: float = 0.0, loss: float = 0.0) -> Iterator[Hosts]:
    """Hosts on one network, each with its own link.

    With a `delay` in seconds each way, or a `loss` (share of the packets), there are two hosts.
    """
    _check_tools()
    run = uuid.uuid4().hex[:6]
    with contextlib.ExitStack() as stack:
        all_hosts = [
            _new_host(index, f"h{index}-{run}", folder, stack) for index in range(num_hosts)
        ]
        if delay or loss:
            stack.enter_context(_slow_link([host.namespace for host in all_hosts], delay, loss))
        else:
            _connect_to_switch(all_hosts, f"sw-{run}", stack)
        for host in all_hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", DEVICE)
            _ip("-n", host.namespace, "link", "set", DEVICE, "up")
        hosts = Hosts(all_hosts, folder)
        stack.callback(hosts.end_all)
        yield hosts


def _connect_to_switch(hosts: Sequence[Host], switch: str, stack: contextlib.ExitStack) -> None:
    _add_namespace(switch, stack)
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")
    for host in hosts:
        port = f"p{host.index}"
        _ip(
            *("link", "add", DEVICE, "netns", host.namespace, "type", "veth"),
            *("peer", "name", port, "netns", switch),
        )
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")


@contextlib.contextmanager
def _slow_link(namespaces: Sequence[str], delay: float, loss: float) -> Iterator[None]:
    if not Path("/dev/net/tun").exists():
        raise NoHosts("there is no /dev/net/tun")
    options = *namespaces, DEVICE, str(delay), str(loss)
    wire = subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.slow_link", *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert wire.stdout is not None
        if wire.stdout.readline() != "ready\n":
            raise NoHosts("TUN devices cannot be created")
        yield
        wire.terminate()
        said = wire.communicate()[0]
        assert re.fullmatch(r"carried [1-9]\d* lost [1-9]\d*\n", said), said
    finally:
        wire.kill()
        wire.wait()


def _add_namespace(name: str, stack: contextlib.ExitStack) -> None:
    _ip("netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False)


def _new_host(index: int, namespace: str, folder: Path, stack: contextlib.ExitStack) -> Host:
    _add_namespace(namespace, stack)
    _ip("-n", namespace, "link", "set", "lo", "up")
    name = f"host{index}"
    home = folder / name
    home.mkdir()
    return Host(name, namespace, f"10.77.0.{index + 1}", index, home)


def _check_tools() -> None:
    for tool in ("ip", "ss", "unshare"):
        if shutil.which(tool) is None:
            raise NoHosts(f"there is no {tool}: install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise NoHosts("only root can create network namespaces")
    test = ["unshare", "--net", "--uts", "--mount", "--time", "--monotonic", "1", "--fork", "true"]
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"namespaces cannot be created here: {done.stderr.strip()}")


def _ip(*arguments: str) -> None:
    try:
        _run("ip", *arguments)
    except subprocess.CalledProcessError as error:
        raise NoHosts(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error


def _run(*arguments: str) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def _variable(pid: int, name: str) -> str | None:
    with contextlib.suppress(psutil.Error):
        value: str | None = psutil.Process(pid).environ().get(name)
        return value
    return None


def wait_for(pattern: str, folder: Path, seconds: float = _END_SECONDS) -> Path:
    """Waits for a file of that pattern under `folder`; returns the first."""
    wait_until(lambda: any(folder.glob(pattern)), seconds, f"{pattern} under {folder}")
    return next(folder.glob(pattern))
