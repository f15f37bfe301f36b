"""Several hosts, simulated by Linux namespaces with their own network, name, clock and folders."""

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

from tests.support.processes import MARK, allowing_for_others, marked, wait_until
from tests.support.shell import DEMO, PHOTO, ROOT, svdpp_here

pytestmark = [pytest.mark.slow, pytest.mark.timing]

DEVICE = "eth0"
_STORE_PORT = 29_500
_END_SECONDS = 100.0


@dataclass
class Job:
    process: subprocess.Popen[bytes]
    out_file: Path
    err_file: Path

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    def end(self) -> int:
        """Wait for the end of a simulated host's process; return its exit code."""
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.err[-3000:]}") from None


@dataclass
class Host:
    """Simulated host: a network namespace with its own address, folder and processes."""

    name: str
    namespace: str
    address: str
    index: int
    home: Path
    jobs: list[Job] = field(default_factory=list)

    def set_link(self, state: str) -> None:
        """Cut the simulated host's network link (`down`) or restore it (`up`)."""
        _ip("-n", self.namespace, "link", "set", DEVICE, state)

    def assert_own_addresses(self, but: str = "") -> None:
        """Check that all programs except `but` listen only on the simulated host's address."""
        lines = _ip("netns", "exec", self.namespace, "ss", "-ltnpH").splitlines()
        assert lines, "the test looks in the wrong place"
        for line in lines:
            address = line.split()[3].rpartition(":")[0]
            assert address == self.address or set(re.findall(r'\("([^"]+)",', line)) == {but}, line


class Hosts:
    """Simulated network of hosts, which starts commands on them."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.all = hosts
        self.mark = uuid.uuid4().hex
        self._names = folder / "hosts"
        self.on_first_host = folder / "on-first-host"
        """Folder that has files only on the first host; on other hosts it is empty."""
        self.on_first_host.mkdir()
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts), ""]
        self._names.write_text("\n".join(lines))

    def torchrun(self, *arguments: str, per_host: int, options: Sequence[str] = ()) -> list[Job]:
        """Start a command of svdpp with torchrun on every simulated host."""
        # The static rendezvous is used, because its agents end with their ranks. Agents of c10d
        # would wait for a store that they cannot reach (docs/cluster.md).
        launcher = (
            *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_host)),
            *("--log-dir", "{host}"),  # instead of a temporary folder
            *("--master-addr", self.all[0].name, "--master-port", str(_STORE_PORT), *options),
        )
        return [
            self.start(host, *launcher, "--node-rank", str(host.index), "-m", "svdpp", *arguments)
            for host in self.all
        ]

    def srun(self, *arguments: str) -> list[Job]:
        """Start a command's rank on every simulated host as srun does: without a launcher."""
        job = {
            **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
            **{"SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "host[0-1]"},
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        }
        return [
            self.start(
                *(host, "-m", "svdpp", *arguments),
                **{**job, "SLURM_PROCID": str(host.index), "SLURM_NODEID": str(host.index)},
            )
            for host in self.all
        ]

    def start(self, host: Host, *arguments: str, **environment: str) -> Job:
        """Start `python ARGUMENTS` on a simulated host; return the process."""
        number = len(host.jobs)
        out_file, err_file = host.home / f"out{number}.txt", host.home / f"err{number}.txt"
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
        with out_file.open("wb") as out, err_file.open("wb") as err:
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
        host.jobs.append(Job(process, out_file, err_file))
        return host.jobs[-1]

    def rank(self, number: int) -> int:
        wanted = f"\0RANK={number}\0".encode()
        environments = ((pid, Path(f"/proc/{pid}/environ")) for pid in marked(self.mark))
        return next(pid for pid, path in environments if wanted in path.read_bytes())

    def end_all(self) -> None:
        """Kill the processes that a failed test has left on the simulated hosts."""
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for host in self.all:
            for job in host.jobs:
                job.process.wait(10)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two simulated hosts on one network, each with its own link.

    Skip the test where this is not possible.
    """
    needed = ("--net", "--uts", "--mount", "--time", "--monotonic", "1", "--fork", "true")
    run = uuid.uuid4().hex[:6]
    with contextlib.ExitStack() as stack:
        try:
            subprocess.run(["unshare", *needed], capture_output=True, check=True)
            _add_namespace(f"sw-{run}", stack)
            _ip("-n", f"sw-{run}", "link", "add", "br0", "type", "bridge")
            _ip("-n", f"sw-{run}", "link", "set", "br0", "up")
            new = [_new_host(index, run, tmp_path, stack) for index in range(2)]
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"namespaces need root, iproute2 and util-linux: {error}")
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


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


def wait_for(pattern: str, folder: Path) -> Path:
    """Wait until a file in `folder` matches the glob pattern; return the file's path."""
    what = f"{pattern} under {folder}"
    return wait_until(lambda: list(folder.glob(pattern)), _END_SECONDS, what)[0]


# --- runs on two hosts ----------------------------------------------------------------------------

_SMALL = ("--frames", "4", "--height", "64", "--width", "64", "--threads", "1")
_CLIPS = (PHOTO, *DEMO, "--steps", "24", "--seeds", "1-4", *_SMALL)
FULL = pytest.mark.full

Bits = dict[str, tuple[str, str]]


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    paths = [path for path in folder.rglob("*.mp4.json") if path.with_suffix("").exists()]
    return {path.name.partition(".")[0]: json.loads(path.read_text()) for path in paths}


def _bits(folder: Path) -> Bits:
    return {
        name: (record["latents_sha256"], record["frames_sha256"])
        for name, record in _records(folder).items()
    }


@pytest.fixture(scope="module")
def bits_of_one_host(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    folder = tmp_path_factory.mktemp("one-host")
    done = svdpp_here("run", *_CLIPS, "--world", "2", "--out", str(folder))
    assert done.code == 0, done.err
    return _bits(folder)


@pytest.mark.full
def test_hosts_write_the_clips_that_they_decode_into_one_folder(
    hosts: Hosts, tmp_path: Path, bits_of_one_host: Bits
) -> None:
    out = tmp_path / "out"
    jobs = hosts.torchrun(
        *("run", *_CLIPS, "--replicas", "2", "--out", str(out)),
        *("--log-file", "{host}/log", "--trace", "{host}/trace.json"),
        per_host=1,
    )
    wait_for("out/*.mp4", tmp_path)
    for host in hosts.all:
        host.assert_own_addresses(but="pt_elastic")  # a program of torchrun itself
    assert [job.end() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err

    records = _records(out)
    assert [records[name]["host"] for name in sorted(records)] == ["host0", "host1"] * 2
    manifest = json.loads((out / "run.json").read_text())
    assert [clip["host"] for clip in manifest["clips"]] == ["host0", "host1"] * 2
    assert _bits(out) == bits_of_one_host

    # The hosts' clocks differ by 100,000 s, which must not show in durations or in the trace.
    seconds = [record["wall_seconds"] for record in records.values()]
    assert all(0 < taken < 100 for taken in seconds), seconds
    events = json.loads((hosts.all[0].home / "trace.json").read_text())
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert max(times) - min(times) < 100e6, "microseconds"

    assert jobs[0].out.splitlines() == [f"{out}/rocket_{seed}.mp4" for seed in range(1, 5)]
    assert "run: 4 of 4 clips: " in jobs[0].err
    assert jobs[1].out == ""
    assert "clips" not in jobs[1].err
    # The host of rank 0 logs the whole run, and the other host only its own rank.
    for host, ranks in zip(hosts.all, ({0, 1}, {1}), strict=True):
        lines = map(json.loads, (host.home / "log").read_text().splitlines())
        assert {line["record"]["extra"]["rank"] for line in lines} - {"-"} == ranks


@pytest.mark.full
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
    assert not [*shared.glob("*.mp4"), *shared.glob(".svdpp-probe-*")]


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
        host.assert_own_addresses()
    handed_over = tmp_path / "handed-over"
    before = {*handed_over.iterdir()}
    # On a busy machine, rank 0 may not have sent the next clip yet.
    wait_until(lambda: {*handed_over.iterdir()} - before, _END_SECONDS, "another latent checkpoint")
    hosts.all[1].set_link("down")
    cut = time.monotonic()
    assert [job.end() for job in jobs] == [6, 6], jobs[0].err + jobs[1].err
    assert time.monotonic() - cut < allowing_for_others(5 + 4)

    lost = r"error: rank 1 \(cpu of host1\) has sent no heartbeat for 4 s at clip \d"
    assert re.search(lost, jobs[0].err), jobs[0].err
    assert jobs[0].err.count("error: rank") == 1
    silent = r"error: nothing has reached rank 0 \(host0\) for 4 s: rank 1 \(cpu of host1\) ends at"
    assert re.search(silent, jobs[1].err), jobs[1].err

    hosts.all[1].set_link("up")
    finished = _bits(tmp_path / "out")
    assert 0 < len(finished) < 4
    jobs = hosts.srun(*command)
    assert [job.end() for job in jobs] == [0, 0], jobs[0].err
    assert jobs[1].out == ""
    assert jobs[0].out.count("(was finished)") == len(finished)
    assert "of them continued from an earlier run" in jobs[0].err
    assert _bits(tmp_path / "out") == bits_of_one_host
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
    assert _bits(tmp_path / "out") == bits_of_one_host
