"""Verification of finished clips by a server, one at a time, only while the ranks are idle."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.errors import OutOfMemoryError
from svdpp.launch import gpus
from svdpp.launch.gpus import Gpu
from svdpp.serve import verifier
from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue
from svdpp.serve.verifier import Verifier
from svdpp.verification import clip_tasks
from tests.support.dummies import HANG_SECONDS
from tests.support.engines import add, demo_config, demo_job, serving, taken
from tests.support.processes import children_of, is_there, wait_until
from tests.support.shell import PYTHONPATH

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Data folder with three finished clips, and the clips' ids, the oldest first."""
    folder = tmp_path_factory.mktemp("data")
    with serving(folder, demo_config()) as service:
        jobs = service.made(*(demo_job(folder, seed) for seed in range(3)))
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    return folder, [job.id for job in jobs]


@dataclass
class Proving:
    store: JobQueue
    verifier: Verifier
    ids: list[str]
    idle: threading.Event
    verdicts: list[str]

    def statuses(self) -> list[str]:
        return [job.verification for id in self.ids if (job := self.store.get(id))]

    def reasons(self) -> list[str | None]:
        return [job.verification_reason for id in self.ids if (job := self.store.get(id))]

    def wait_for(self, *statuses: str) -> None:
        wait_until(
            lambda: self.statuses() == [*statuses], HANG_SECONDS, lambda: str(self.statuses())
        )


@contextmanager
def _proving(
    made: tuple[Path, list[str]], folder: Path, *, when_idle: bool = False
) -> Iterator[Proving]:
    shutil.copytree(made[0], folder, dirs_exist_ok=True)
    before = _temporary_files()
    store, idle = JobQueue(folder), threading.Event()
    verdicts: list[str] = []
    verifier = Verifier(store, idle.is_set, when_idle=when_idle, on_result=verdicts.append)
    verifier.thread.start()
    try:
        yield Proving(store, verifier, made[1], idle, verdicts)
    finally:
        verifier.thread.close()
        store.close()
        assert _temporary_files() == before


def _temporary_files() -> set[str]:
    return set(os.listdir(os.environ["TMPDIR"]))


def _verifier_pids() -> list[int]:
    """Return the process ids of this process's children that verify a clip."""
    return children_of(os.getpid(), "svdpp.serve.verifier")


def _wait_for_verifier() -> int:
    """Wait until a child verifies a clip, and return its process id."""
    wait_until(_verifier_pids, HANG_SECONDS, "no process")
    return _verifier_pids()[0]


@pytest.mark.full
def test_idle_time_proves_the_newest_first_and_says_what_is_wrong(
    made: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Idle time is used to verify clips, the newest first, and differences are reported.

    If the verifying process is killed, for example because memory ran out, the verification can be
    requested again.
    """
    with _proving(made, tmp_path, when_idle=True) as proving:
        oldest = tmp_path / "clips" / f"{proving.ids[0]}.mp4.json"
        metadata = json.loads(oldest.read_text())
        metadata["latents_sha256"] = "0" * 64
        oldest.write_text(json.dumps(metadata))
        photo = tmp_path / "photos" / f"{proving.ids[1]}.jpg"
        photo.write_bytes(b"another")
        assert proving.statuses() == ["none"] * 3
        proving.idle.set()
        proving.wait_for("none", "none", "running")
        child = _wait_for_verifier()
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, child) == 19, HANG_SECONDS, "not nice")
        os.kill(child, signal.SIGKILL)
        proving.wait_for("different", "failed", "failed")
        different, failed, killed = map(str, proving.reasons())
        assert different.startswith("latent, file (the metadata in the file says")
        assert failed.startswith(f"the image of '{proving.ids[1]}.mp4' is not at '{photo.name}'")
        assert "ended with code -9" in killed
        assert proving.verifier.request(proving.ids[2])
        proving.wait_for("different", "failed", "equal")
        assert proving.reasons()[2] is None
        oldest.unlink()
        assert proving.verifier.request(proving.ids[0])
        proving.wait_for("failed", "failed", "equal")
        assert proving.reasons()[0] == "file missing: the clip's JSON"
    assert proving.verdicts == ["different", "equal"]


def test_owners_take_turns_in_verifications(tmp_path: Path) -> None:
    """Owners take turns, even if Bob requests his verifications again and again.

    Bob's clips are older, and he requests each one again as soon as it is verified.
    """
    with contextlib.closing(JobQueue(tmp_path)) as queue:
        owners = ["bob", "bob", "bob", "alice", "alice"]
        owner_of = {add(queue, owner=owner): owner for owner in owners}
        verifier = Verifier(queue, lambda: True)
        for _ in owners:
            job = taken(queue)
            queue.complete(job.id, {"file_sha256": "0"}, job.fencing_token)
            assert verifier.request(job.id)
        turns = list[str]()
        for _ in range(4):
            first = verifier._candidates()[0]
            turns.append(owner_of[first])
            assert verifier._verify(first)
            if owner_of[first] == "bob":
                assert verifier.request(first)
        assert turns == ["bob", "alice", "bob", "alice"]


@pytest.mark.full
def test_work_stops_it_at_once_and_it_goes_on_when_idle(
    made: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """A verification stops as soon as the ranks have work, and starts again when they are idle.

    The verification also stops if its clip is removed.
    """
    with _proving(made, tmp_path) as proving:
        assert proving.verifier.request(proving.ids[1])
        assert proving.verifier.request(proving.ids[1])
        assert proving.statuses() == ["none", "running", "none"]
        assert _verifier_pids() == []
        proving.idle.set()
        begun = _temporary_files()
        wait_until(lambda: _temporary_files() > begun, HANG_SECONDS, "no recomputation")
        (child,) = _verifier_pids()
        proving.idle.clear()
        wait_until(lambda: not is_there(child), HANG_SECONDS, "it goes on")
        wait_until(lambda: proving.verifier.running is None, HANG_SECONDS, "it runs")
        assert _temporary_files() == begun
        assert proving.statuses() == ["none", "running", "none"], "it is still requested"
        proving.idle.set()
        _wait_for_verifier()  # the verification starts again
        assert not proving.verifier.request("video_unknown")
        assert proving.verifier.request(proving.ids[0])
        for id in proving.ids:
            proving.verifier.cancel(id)
        wait_until(lambda: _verifier_pids() == [], HANG_SECONDS, "it goes on")
        assert proving.statuses() == ["none"] * 3


SERVER = """
import sys, threading
from pathlib import Path
from svdpp.serve.verifier import Verifier
from svdpp.serve.queue import JobQueue

folder = Path(sys.argv[1])
Verifier(JobQueue(folder), lambda: True, when_idle=True).thread.start()
threading.Event().wait()
"""


def test_a_verification_ends_with_a_killed_server_and_leaves_nothing(
    made: tuple[Path, list[str]], tmp_path: Path
) -> None:
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    temporary = Path(tempfile.mkdtemp())  # paths of sockets must be short
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(temporary)},
    )
    wait_until(lambda: list(temporary.rglob("svdpp-verify-*")), HANG_SECONDS, "no verification")
    (process,) = children_of(server.pid, "svdpp.serve.verifier")
    server.kill()
    server.wait()
    wait_until(lambda: not is_there(process), HANG_SECONDS, "it goes on")
    assert not [*map(str, temporary.rglob("*"))]
    temporary.rmdir()


def _gpu(index: int, free_bytes: int, name: str = "H200") -> Gpu:
    about: dict[str, Any] = {"uuid": f"GPU-{index}", "capability": "9.0", "total_bytes": 2**40}
    return Gpu(index=index, name=name, free_bytes=free_bytes, **about)


def test_a_verification_takes_the_freest_gpu_of_the_clips_kind() -> None:
    gpus = [_gpu(0, 1), _gpu(1, 4), _gpu(2, 3), _gpu(3, 9, "A100")]
    assert clip_tasks.choose_device({"conditions": {"gpu": "H200"}}, gpus) == "cuda:1"
    assert clip_tasks.choose_device({"conditions": {}}, gpus) == "cuda:3"
    assert clip_tasks.choose_device({"conditions": {"gpu": "B200"}}, gpus) == "cuda:0"


def test_a_verification_needs_free_memory_beside_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(demo_config(1), device="cuda:1")
    free = [_gpu(0, 2**40), _gpu(1, 2**29)]
    monkeypatch.setattr(gpus, "visible_gpus", lambda: free)
    monkeypatch.setattr("svdpp.driver.resolve.estimate_ranks", lambda *_: [2**30])
    with pytest.raises(OutOfMemoryError, match=r"cuda:1 has 0\.5 GiB free"):
        verifier._check_gpu(config)
    free[1] = _gpu(1, 2**40)
    verifier._check_gpu(config)
