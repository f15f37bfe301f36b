"""Several hosts as namespaces of one machine: each has its sockets, name, clock and folders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import DEMO, PHOTO, ROOT, svdpp_here
from tests.faults.processes import MARK, allowing_for_others, marked, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timing]

DEVICE = "eth0"
_STORE_PORT = 29_500
_END_SECONDS = 100.0


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
        said = _ip("netns", "exec", self.namespace, "ss", "-ltnpH")
        found: dict[str, set[str]] = {}
        for line in said.splitlines():
            address = line.split()[3].rpartition(":")[0]
            found.setdefault(address, set()).update(re.findall(r'\("([^"]+)",', line))
        return found


class Hosts:
    """A network of hosts."""

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

    def torchrun(self, *arguments: str, per_host: int, options: Sequence[str] = ()) -> list[Job]:
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
                *(*options, "-m", "svdpp"),
            )
            jobs.append(self.start(host, *launcher, *arguments))
        return jobs

    def srun(self, *arguments: str) -> list[Job]:
        """Starts a rank of the command on every host as srun does: no launcher stays."""
        number = len(self.all)
        job = {
            **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(number)},
            **{"SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": f"host[0-{number - 1}]"},
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{number})",
        }
        return [
            self.start(
                *(host, "-m", "svdpp", *arguments),
                **{**job, "SLURM_PROCID": str(host.index), "SLURM_NODEID": str(host.index)},
            )
            for host in self.all
        ]

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

    def rank(self, number: int) -> int:
        wanted = f"\0RANK={number}\0".encode()
        environments = ((pid, Path(f"/proc/{pid}/environ")) for pid in marked(self.mark))
        return next(pid for pid, path in environments if wanted in path.read_bytes())

    def end_all(self) -> None:
        """Ends the processes that a failed test has left."""
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for host in self.all:
            for job in host.jobs:
                job.process.wait(10)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts on one network, each with its own link; skips where that is not possible."""
    _check_tools()
    run = uuid.uuid4().hex[:6]
    with contextlib.ExitStack() as stack:
        try:
            _add_namespace(f"sw-{run}", stack)
            _ip("-n", f"sw-{run}", "link", "add", "br0", "type", "bridge")
            _ip("-n", f"sw-{run}", "link", "set", "br0", "up")
            new = [_new_host(index, run, tmp_path, stack) for index in range(2)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{error}: {error.stderr}")
        hosts = Hosts(new, tmp_path)
        stack.callback(hosts.end_all)
        yield hosts


def _add_namespace(name: str, stack: contextlib.ExitStack) -> None:
    _ip("netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False)


def _new_host(index: int, run: str, folder: Path, stack: contextlib.ExitStack) -> Host:
    namespace, switch, port = f"h{index}-{run}", f"sw-{run}", f"p{index}"
    host = Host(f"host{index}", namespace, f"10.77.0.{index + 1}", index, folder / f"host{index}")
    host.home.mkdir()
    _add_namespace(namespace, stack)
    _ip("-n", namespace, "link", "set", "lo", "up")
    cable = ("link", "add", DEVICE, "netns", namespace, "type", "veth", "peer", "name", port)
    _ip(*cable, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", DEVICE)
    host.set_link("up")
    return host


def _check_tools() -> None:
    for tool in ("ip", "ss", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}: install iproute2 and util-linux")
    if os.geteuid() != 0:
        pytest.skip("only root can create network namespaces")
    test = ["unshare", "--net", "--uts", "--mount", "--time", "--monotonic", "1", "--fork", "true"]
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"namespaces cannot be created here: {done.stderr.strip()}")


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


def wait_for(pattern: str, folder: Path, seconds: float = _END_SECONDS) -> Path:
    """Waits for a file of that pattern under `folder`; returns the first."""
    wait_until(lambda: any(folder.glob(pattern)), seconds, f"{pattern} under {folder}")
    return next(folder.glob(pattern))


# --- runs on two hosts ----------------------------------------------------------------------------

_SMALL = ("--frames", "4", "--height", "64", "--width", "64", "--threads", "1")
_CLIPS = (PHOTO, *DEMO, "--steps", "24", "--seeds", "1-4", *_SMALL)
_TORCHRUNS_OWN = {"pt_elastic"}
FULL = pytest.mark.full


Bits = dict[str, tuple[str, str]]


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    paths = [path for path in folder.rglob("*.mp4.json") if path.with_suffix("").exists()]
    return {path.name.partition(".")[0]: json.loads(path.read_text()) for path in paths}


def _bits(records: dict[str, dict[str, Any]]) -> Bits:
    return {
        name: (record["latents_sha256"], record["frames_sha256"])
        for name, record in records.items()
    }


@pytest.fixture(scope="module")
def bits_of_one_host(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    folder = tmp_path_factory.mktemp("one-host")
    done = svdpp_here("run", *_CLIPS, "--world", "2", "--out", str(folder))
    assert done.code == 0, done.err
    return _bits(_records(folder))


def _assert_own_addresses(host: Host, but: set[str] = _TORCHRUNS_OWN) -> None:
    found = host.listening()
    assert found, "the test looks in the wrong place"
    for address, programs in found.items():
        assert address == host.address or programs == but, (address, programs)


def test_hosts_write_the_clips_that_they_decode_into_one_folder(
    hosts: Hosts, tmp_path: Path, bits_of_one_host: Bits
) -> None:
    out = tmp_path / "out"
    jobs = hosts.torchrun(
        *("run", *_CLIPS, "--replicas", "2", "--out", str(out)),
        *("--log-file", "{host}/log", "--trace", "{host}/trace.json"),
        per_host=2,
    )
    wait_for("out/*.mp4", tmp_path)
    for host in hosts.all:
        _assert_own_addresses(host)
    assert [job.end() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err

    records = _records(out)
    assert [records[name]["host"] for name in sorted(records)] == ["host0", "host1"] * 2
    manifest = json.loads((out / "run.json").read_text())
    assert [clip["host"] for clip in manifest["clips"]] == ["host0", "host1"] * 2
    assert _bits(records) == bits_of_one_host

    # The hosts' clocks are 100000 s apart.
    seconds = [record["wall_seconds"] for record in records.values()]
    assert all(0 < taken < 100 for taken in seconds), seconds
    events = json.loads(hosts[0].path("trace.json").read_text())
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert max(times) - min(times) < 100e6, "microseconds"

    assert jobs[0].out.splitlines() == [f"{out}/rocket_{seed}.mp4" for seed in range(1, 5)]
    assert "run: 4 of 4 clips: " in jobs[0].err
    assert jobs[1].out == ""
    assert "clips" not in jobs[1].err
    assert _ranks_in_log(hosts[0]) == {0, 1, 2, 3}, "rank 0's host logs the whole run"
    assert _ranks_in_log(hosts[1]) == {2, 3}, "the others log their own ranks"


@pytest.mark.parametrize(
    "private", ["--out", *(pytest.param(n, marks=FULL) for n in ("images", "--latents-dir"))]
)
def test_a_folder_of_one_host_alone_is_refused_by_name(
    hosts: Hosts, tmp_path: Path, private: str
) -> None:
    alone, shared = hosts.on_first_host, tmp_path / "shared"
    photo = shutil.copy(PHOTO, alone) if private == "images" else PHOTO
    jobs = hosts.torchrun(
        *("run", photo, *_CLIPS[1:], "--out", str(alone if private == "--out" else shared)),
        *("--latents-dir", str(alone if private == "--latents-dir" else shared)),
        per_host=1,
    )
    assert [job.end() for job in jobs] == [1, 1], "torchrun's own code"
    assert f"error: host1 cannot use '{alone}' of rank 0's host\n" in jobs[0].err
    assert "is gone" not in jobs[1].err, "rank 1 learns the reason"
    assert not list(shared.glob("*.mp4"))


def _ranks_in_log(host: Host) -> set[int]:
    lines = host.path("log").read_text().splitlines()
    ranks = [json.loads(line)["record"]["extra"]["rank"] for line in lines]
    return {rank for rank in ranks if isinstance(rank, int)}


def test_a_cut_cable_ends_both_sides_and_the_run_goes_on_later(
    hosts: Hosts, tmp_path: Path, bits_of_one_host: Bits
) -> None:
    command = (
        *("run", *_CLIPS, "--split", "alternating", "--timeout", "5"),
        *("--out", str(tmp_path / "out")),
        *("--latents-dir", str(tmp_path / "handed-over"), "--resume"),
    )
    jobs = hosts.srun(*command)
    wait_for("out/*.mp4", tmp_path)
    for host in hosts.all:
        _assert_own_addresses(host, but=set())
    handed_over = tmp_path / "handed-over"
    before = {*handed_over.iterdir()}
    # A busy rank 0 may have handed over no other clip yet.
    wait_until(lambda: {*handed_over.iterdir()} - before, _END_SECONDS, "another latent checkpoint")
    hosts[1].set_link("down")
    cut = time.monotonic()
    assert [job.end() for job in jobs] == [6, 6], jobs[0].err + jobs[1].err
    assert time.monotonic() - cut < allowing_for_others(5 + 4)

    lost = r"error: rank 1 \(cpu of host1\) has sent no heartbeat for 4 s at clip \d"
    assert re.search(lost, jobs[0].err), jobs[0].err
    assert jobs[0].err.count("error: rank") == 1
    silent = r"error: nothing has reached rank 0 \(host0\) for 4 s: rank 1 \(cpu of host1\) ends at"
    assert re.search(silent, jobs[1].err), jobs[1].err

    hosts[1].set_link("up")
    finished = _bits(_records(tmp_path / "out"))
    assert 0 < len(finished) < 4
    jobs = hosts.srun(*command)
    assert [job.end() for job in jobs] == [0, 0], jobs[0].err
    assert jobs[1].out == ""
    assert jobs[0].out.count("(was finished)") == len(finished)
    assert "of them continued from an earlier run" in jobs[0].err
    assert _bits(_records(tmp_path / "out")) == bits_of_one_host
    assert not list(handed_over.iterdir())


@FULL
def test_torchrun_starts_again_and_nothing_is_done_twice(
    hosts: Hosts, tmp_path: Path, bits_of_one_host: Bits
) -> None:
    jobs = hosts.torchrun(
        *("run", *_CLIPS, "--split", "alternating", "--out", str(tmp_path / "out")),
        *("--latents-dir", str(tmp_path / "handed-over")),
        per_host=1,
        options=("--max-restarts", "1"),
    )
    first = wait_for("out/*.mp4.json", tmp_path)
    made_at = first.stat().st_mtime_ns
    os.kill(hosts.rank(1), signal.SIGKILL)
    assert [job.end() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert re.search(r"error: rank 1 \(cpu of host1\) is gone at clip \d", jobs[0].err)
    assert "(was finished)" in jobs[0].out
    assert first.stat().st_mtime_ns == made_at
    assert _bits(_records(tmp_path / "out")) == bits_of_one_host
