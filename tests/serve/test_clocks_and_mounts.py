"""A wrong clock, or a data folder whose disk is not mounted, makes no server delete anything."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from svdpp.errors import InputError
from svdpp.serve import clock
from svdpp.serve.clips import RequestBuilder
from svdpp.serve.clock import ClockError, SteadyClock
from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue
from svdpp.serve.retention import enforce_retention, remove_job, remove_orphans
from svdpp.serve.sqlite import StorageUnavailableError
from tests.support.engines import add, dummy_config, in_state, job_of, serving, taken
from tests.support.http_server import QUICK, HttpServer, error_of

_DAYS = 86400.0
_FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


@contextlib.contextmanager
def clock_ahead(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Set this process's clock ahead by `seconds` during the block, or back if negative."""
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + seconds)
        yield


@pytest.mark.parametrize("days", [2.0, -2.0])
def test_a_clock_that_jumps_ages_nothing(
    each_store: JobQueue, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    """If the clock jumps, no clip counts as too old, and no clip has a negative duration.

    This holds for a clip that ended before the jump and for one that ends after it.
    """
    queue = each_store
    before = in_state(queue, JobState.COMPLETED, created_at=queue.now())
    running = add(queue, created_at=queue.now())
    token = taken(queue).fencing_token
    with clock_ahead(monkeypatch, days * _DAYS):
        assert abs(queue.now() - time.time()) > _DAYS
        queue.complete(running, {}, token)
        with pytest.raises(ClockError, match="the clock of this machine is 1728") as refused:
            enforce_retention(queue, queue.now(), 3600.0, None)
        assert refused.value.details["skew_seconds"] == pytest.approx(days * _DAYS, abs=5)
    assert set(queue.clip_tokens()) == {before, running}
    for job in (job_of(queue, before), job_of(queue, running)):
        assert job.started_at is not None
        assert job.finished_at is not None
        assert job.created_at <= job.started_at <= job.finished_at <= time.time() + 1
    assert enforce_retention(queue, queue.now(), 3600.0, None) == []


def test_small_corrections_of_a_clock_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    with clock_ahead(monkeypatch, 40.0):
        assert clock.now() == pytest.approx(time.time(), abs=1)
        with clock_ahead(monkeypatch, 59.0):
            assert clock.now() == pytest.approx(time.time(), abs=1)


_SWEEP = """
import sys, time
from pathlib import Path
from svdpp.serve.queue import JobQueue
from svdpp.serve.retention import (enforce_retention)
queue = JobQueue(Path(sys.argv[1]), url=sys.argv[2])
print(f"{time.time() - queue.now():.0f}")
enforce_retention(queue, time.time(), 86400.0, None)
"""


@pytest.mark.slow
@pytest.mark.skipif(_FAKETIME is None, reason="needs libfaketime: apt-get install libfaketime")
def test_a_server_with_a_fast_clock_deletes_nothing_of_the_others(
    tmp_path: Path, database: str
) -> None:
    with contextlib.closing(JobQueue(tmp_path / "data", url=database)) as queue:
        ids = {in_state(queue, JobState.COMPLETED, created_at=queue.now()) for _ in range(3)}
        fast = {"LD_PRELOAD": str(_FAKETIME), "FAKETIME": "+2d", "DONT_FAKE_MONOTONIC": "1"}
        done = subprocess.run(
            [sys.executable, "-c", _SWEEP, str(tmp_path / "data"), database],
            env={**os.environ, **fast},
            capture_output=True,
            text=True,
            check=False,
        )
        assert int(done.stdout) == pytest.approx(2 * _DAYS, abs=30)
        assert "ClockError" in done.stderr
        assert set(queue.clip_tokens()) == ids


def test_a_clock_is_trusted_after_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    at = 1000.0
    monkeypatch.setattr(clock, "uptime", lambda: at)
    watched = SteadyClock()
    at += 599.0
    assert not watched.is_settled
    at += 2.0
    assert watched.is_settled


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(_FAKETIME is None, reason="needs libfaketime: apt-get install libfaketime")
def test_a_server_that_starts_with_a_wrong_clock_keeps_its_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose clock is 400 days ahead at its start removes no clips.

    This happens on a machine that boots before NTP has set its clock.
    """
    with contextlib.closing(JobQueue(tmp_path / "data")) as queue:
        ids = {in_state(queue, JobState.COMPLETED, created_at=queue.now()) for _ in range(3)}
    monkeypatch.setenv("LD_PRELOAD", str(_FAKETIME))
    monkeypatch.setenv("FAKETIME", "+400d")
    monkeypatch.setenv("DONT_FAKE_MONOTONIC", "1")
    with HttpServer(tmp_path / "data", *QUICK, "--keep-days", "1", "--keep-gb", "1") as server:
        monkeypatch.undo()
        server.wait_ready()  # retention would have removed the clips when the server started
        time.sleep(1.0)
        for id in ids:
            assert server.video(id)["status"] == "completed"


@contextlib.contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    """Swap a folder for an empty one during the block, as if the folder's disk were not mounted."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.mkdir()
    try:
        yield
    finally:
        folder.rmdir()
        away.rename(folder)


def test_nothing_is_removed_while_its_disk_is_not_mounted(
    each_store: JobQueue, tmp_path: Path
) -> None:
    """A job's row stays while the job's files are not mounted, so they can be removed later."""
    queue, folder = each_store, tmp_path / "data"
    id = in_state(queue, JobState.COMPLETED)
    clip = job_of(queue, id).clip_path(folder)
    clip.parent.mkdir()
    clip.touch()
    seen = remove_orphans(queue, set())
    with unmounted(folder):
        assert queue.unavailable_reason
        for use in (
            lambda: remove_job(queue, id),
            lambda: enforce_retention(queue, queue.now() + 1, 0.0, None),
            lambda: queue.store.fetch(clip),
            lambda: queue.store.put(clip),
            lambda: queue.store.remove(clip),
        ):
            with pytest.raises(StorageUnavailableError, match="is not there"):
                use()
        assert remove_orphans(queue, seen) == set()
        assert job_of(queue, id).state is JobState.COMPLETED
    assert queue.unavailable_reason == ""
    assert enforce_retention(queue, queue.now() + 1, 0.0, None) == [id]
    assert not clip.exists()


@pytest.mark.slow
def test_clips_that_need_files_which_are_not_mounted_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips whose images are on an unmounted disk wait until it is mounted; they do not fail."""
    folder = tmp_path / "data"
    request_builder, failures = RequestBuilder.__call__, [True]

    def unmounting(self: RequestBuilder, job: object) -> object:
        if failures:
            failures.pop()
            with unmounted(folder):
                pass
            folder.rename(tmp_path / "away")
            raise InputError("the image is missing")
        return request_builder(self, job)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestBuilder, "__call__", unmounting)
    with serving(folder, dummy_config()) as own:
        ids = own.add(1, 2)
        own.wait(lambda: own.engine.dispatcher.unavailable_reason, "the folder is not looked at")
        assert not failures
        (tmp_path / "away").rename(folder)
        assert {job.state for job in own.wait_final(ids)} == {JobState.COMPLETED}


@pytest.mark.slow
@pytest.mark.parametrize(("times", "state"), [(1, JobState.COMPLETED), (9, JobState.FAILED)])
def test_a_clip_whose_files_were_away_for_a_moment_is_begun_once_more(
    times: int, state: JobState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an image is missing once, its clip is begun again; if it is missing twice, the clip fails.

    The disk is mounted again before the server checks whether the disk is mounted.
    """
    request_builder, begun = RequestBuilder.__call__, list[object]()

    def missing(self: RequestBuilder, job: object) -> object:
        begun.append(job)
        if len(begun) <= times:
            raise InputError("'photo.png' does not exist")
        return request_builder(self, job)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestBuilder, "__call__", missing)
    with serving(tmp_path / "data", dummy_config()) as own:
        ids = own.add(1)
        assert [job.state for job in own.wait_final(ids)] == [state]
    assert len(begun) == 2


@pytest.mark.slow
def test_an_upload_whose_disk_goes_is_not_called_an_unreadable_image(
    keyed: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = keyed.service  # type: ignore[attr-defined]
    keep = service.uploads.save

    def gone(*_: object) -> None:
        monkeypatch.setattr(service.queue.store, "_has_queue_file", lambda: False)
        raise InputError("'photo.png' does not exist")

    monkeypatch.setattr(service.uploads, "save", gone)
    error_of(keyed.request(), 503, "storage_unavailable")
    monkeypatch.undo()
    assert service.uploads.save == keep
    assert keyed.request().status_code == 202


@pytest.mark.slow
@pytest.mark.full
def test_a_server_says_that_its_files_are_not_mounted(
    start: Callable[..., HttpServer], tmp_path: Path
) -> None:
    """While the data folder is not mounted, requests that need its files get status 503.

    The server does not claim that the disk is full or that the clip has no file.
    """
    server = start(*QUICK)
    (id,) = server.add()
    server.wait_for(id, "completed")
    with unmounted(tmp_path / "data"):
        ready = server.client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (
            503,
            "the folder of the videos is not there",
        )
        for answer in (
            server.request(),
            server.client.delete(f"/v1/videos/{id}"),
            server.client.get(f"/v1/videos/{id}/content"),
        ):
            error_of(answer, 503, "storage_unavailable")
            assert int(answer.headers["Retry-After"]) > 0
        assert server.video(id)["status"] == "completed"
    server.wait_ready()
    assert server.client.delete(f"/v1/videos/{id}").status_code == 200
