"""On a full disk clips wait instead of failing, and clients can remove finished ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from svdpp.serve.database import RESERVE
from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue
from tests.serve.engines import dummy_config, serving
from tests.serve.http_server import QUICK, HttpServer, error_of
from tests.serve.store_jobs import add
from tests.small_disk import small_disk

#: An eighth of it is the low-water mark.
SIZE = "size=64m"


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Another program's files take all space, also what is given up at first."""
    with contextlib.suppress(OSError), (disk / "ballast").open("ab", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        (disk / "ballast").unlink()


def test_the_reserve_is_given_up_and_taken_back(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        reserve = disk / "data" / RESERVE
        with contextlib.closing(JobQueue(disk / "data")) as store:
            ids = [add(store) for _ in range(100)]
            assert reserve.stat().st_blocks * 512 == 4 * 2**20
            assert not store.store.is_disk_low
            with full(disk):
                assert store.store.is_disk_low
                assert all(store.cancel_waiting(id) for id in ids)
                assert not reserve.exists()
            add(store)
            assert reserve.exists()


@pytest.mark.processes
def test_clips_wait_for_space(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk, serving(disk / "data", dummy_config()) as own:
        with full(disk):
            own.wait(lambda: own.engine.feeder.why_waits, "the disk is not looked at")
            ids = own.add(1, 2)
            own.wait(lambda: own.store.waiting(), "the queue is not read")
            assert own.states(ids) == [JobState.QUEUED] * 2
            has_space_at = time.time()
        jobs = own.wait_final(ids)
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        assert all((job.started_at or 0) > has_space_at for job in jobs)


@pytest.mark.processes
def test_clients_make_space_on_a_full_disk_and_after_a_restart(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        folder = disk / "data"
        with HttpServer(folder, *QUICK, "--grace", "0") as server:
            server.wait_ready()
            done = server.add(3)
            server.wait_for(done[-1], "completed")
            running, *waiting = server.add(4, steps=1000)
            with full(disk):
                assert server.client.get("/health").status_code == 200
                answer = server.client.get("/ready")
                assert answer.status_code == 503
                assert answer.json()["reason"] == "the disk is nearly full"
                error_of(server.request(), 503, "disk_full")
                for id in (done[0], running, waiting[0]):
                    assert server.client.delete(f"/v1/videos/{id}").status_code == 200
                    assert not list(folder.rglob(f"{id}*"))
                assert server.stop() == 0
                again = HttpServer(folder, *QUICK, "--grace", "0")
                error_of(again.request(), 503, "disk_full")
                for id in (done[1], waiting[1]):
                    assert again.client.delete(f"/v1/videos/{id}").status_code == 200
                assert again.video(done[2])["status"] == "completed"
        with again:
            again.wait_ready()
            assert again.request().status_code == 202
