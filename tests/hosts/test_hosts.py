"""Several hosts as namespaces of one machine: each has its sockets, name, clock and folders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import DEMO, PHOTO, svdpp_here
from tests.faults.processes import allowing_for_others
from tests.hosts.hosts import Host, Hosts, NoHosts, made, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timing]

_SMALL = ("--frames", "4", "--height", "64", "--width", "64", "--threads", "1")
_CLIPS = (PHOTO, *DEMO, "--steps", "24", "--seeds", "1-4", *_SMALL)
_TORCHRUNS_OWN = {"pt_elastic"}
FULL = pytest.mark.full


Bits = dict[str, tuple[str, str]]
MakeHosts = Callable[..., Hosts]


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Creates hosts on one network, see `made`; skips the test where that is not possible."""
    with contextlib.ExitStack() as stack:

        def make(num_hosts: int, **link: float) -> Hosts:
            try:
                return stack.enter_context(made(num_hosts, tmp_path, **link))
            except NoHosts as reason:
                pytest.skip(str(reason))

        yield make


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
    for address, programs in host.listening().items():
        assert address == host.address or programs == but, (address, programs)


def test_hosts_write_the_clips_that_they_decode_into_one_folder(
    make_hosts: MakeHosts, tmp_path: Path, bits_of_one_host: Bits
) -> None:
    hosts, out = make_hosts(2), tmp_path / "out"
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
    make_hosts: MakeHosts, tmp_path: Path, private: str
) -> None:
    hosts = make_hosts(2)
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
    make_hosts: MakeHosts, tmp_path: Path, bits_of_one_host: Bits
) -> None:
    hosts = make_hosts(2)
    command = (
        *("run", *_CLIPS, "--split", "alternating", "--timeout", "5"),
        *("--out", str(tmp_path / "out")),
        *("--latents-dir", str(tmp_path / "handed-over"), "--resume"),
    )
    jobs = hosts.torchrun(*command, per_host=1)
    wait_for("out/*.mp4", tmp_path)
    hosts[1].set_link("down")
    cut = time.monotonic()
    assert [job.end() for job in jobs] == [1, 1], "torchrun's own code"
    assert time.monotonic() - cut < allowing_for_others(5 + 4)

    for job in jobs:
        root_cause = job.err.partition("Root Cause")[2]
        assert re.search(r"\n +exitcode +: 6 ", root_cause), job.err
    lost = r"error: rank 1 \(cpu of host1\) has sent no heartbeat for 4 s at clip \d"
    assert re.search(lost, jobs[0].err), jobs[0].err
    assert jobs[0].err.count("error: rank") == 1
    silent = r"error: nothing has reached rank 0 \(host0\) for 4 s: rank 1 \(cpu of host1\) ends at"
    assert re.search(silent, jobs[1].err), jobs[1].err

    hosts[1].set_link("up")
    finished = _bits(_records(tmp_path / "out"))
    assert 0 < len(finished) < 4
    jobs = hosts.torchrun(*command, per_host=1)
    assert [job.end() for job in jobs] == [0, 0], jobs[0].err
    assert jobs[0].out.count("(was finished)") == len(finished)
    assert "of them continued from an earlier run" in jobs[0].err
    assert _bits(_records(tmp_path / "out")) == bits_of_one_host
    assert not list((tmp_path / "handed-over").iterdir())


def test_a_slow_wire_that_loses_packets_changes_no_bit(make_hosts: MakeHosts) -> None:
    """20 ms each way, and every hundredth packet is lost."""
    jobs = make_hosts(2, delay=0.02, loss=0.01).torchrun(
        *("verify", PHOTO, *DEMO, "--steps", "8", *_SMALL, "--json"), per_host=1
    )
    assert [job.end() for job in jobs] == [0, 0], jobs[0].err
    verdict = json.loads(jobs[0].out)
    assert verdict["bitwise"]
    assert {check["what"] for check in verdict["checks"]} == {"latent", "final_latent", "frames"}


@FULL
def test_torchrun_starts_again_and_nothing_is_done_twice(
    make_hosts: MakeHosts, tmp_path: Path, bits_of_one_host: Bits
) -> None:
    hosts = make_hosts(2)
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


def test_four_hosts_by_the_variables_of_srun(make_hosts: MakeHosts) -> None:
    """Started as by srun: no launcher stays, and rank 0 hosts the store."""
    hosts = make_hosts(4)
    jobs = [
        hosts.start(
            host,
            *("-m", "svdpp", "simulate", "--costs", "svd-xt-a100", "--time-scale", "0.02"),
            *("--steps", "28", "--clips", "8", "--json", "--log-file", "{host}/log"),
            *("--latent-shape", "1", "4", "2", "8", "8", "--threads", "1"),
            **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"},
            **{"SLURM_PROCID": str(host.index), "SLURM_LOCALID": "0"},
            **{"SLURM_NODEID": str(host.index), "SLURM_STEP_NODELIST": "host[0-3]"},
            SLURM_STEP_TASKS_PER_NODE="1(x4)",
        )
        for host in hosts.all
    ]
    log = hosts[0].path("log")
    while not (log.exists() and "clip 0 is finished" in log.read_text()):
        assert jobs[0].process.poll() is None, jobs[0].err
        time.sleep(0.1)
    for host in hosts.all:
        assert host.listening(), "the test looks in the wrong place"
        _assert_own_addresses(host, but=set())
    assert [job.end() for job in jobs] == [0] * 4, jobs[0].err
    report = json.loads(jobs[0].out)
    assert (report["world_size"], report["clips"]) == (4, 8)
    assert 0 < report["measured"]["makespan_seconds"] < 100
    assert [job.out for job in jobs[1:]] == [""] * 3
