"""A status call that is answered from memory says what the queue's file says."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import httpx

from svdpp.errors import ClosedError
from svdpp.serve.build import ServerSettings, build
from svdpp.serve.job import Job
from svdpp.serve.job_cache import JobCache
from svdpp.serve.keys import Owner
from svdpp.serve.schemas import Video
from svdpp.serve.service import Service
from svdpp.serve.store import JobStore
from tests.serve.engines import dummy_config, dummy_job
from tests.serve.store_jobs import add, new_job


def test_the_answer_is_the_one_of_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dummy_config(2, step_seconds=0.01)
    app, service = build(
        ServerSettings(config=config, folder=tmp_path, sizes=((64, 64),), max_open=9), None
    )
    job = service.store.add(dummy_job(3, photo_name='é"\\.png'), max_open=None)

    async def ask(id: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(f"/v1/videos/{id}")

    def refuse(*_: object) -> None:
        raise AssertionError("not from memory")

    usual = asyncio.run(ask(job.id))
    with monkeypatch.context() as patch:
        patch.setattr(Service, "job", refuse)
        at_hand = asyncio.run(ask(job.id))
    assert (
        (at_hand.status_code, at_hand.content)
        == (usual.status_code, usual.content)
        == (
            200,
            usual.content,
        )
    )
    assert at_hand.headers == usual.headers
    assert 'route="/v1/videos/{id}",status="200"} 2.0' in service.metrics.exposed().decode()
    assert service.video_at_hand(job.id, Owner("another")) is None
    service.store.cancel_waiting(job.id)
    assert asyncio.run(ask(job.id)).json()["status"] == "cancelled"
    service.store.close()


def test_the_first_event_of_a_stream_has_the_smallest_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the clip ends while its present state is read for that event."""
    settings = ServerSettings(
        config=dummy_config(2, step_seconds=0.01), folder=tmp_path, sizes=((64, 64),), max_open=9
    )
    app, service = build(settings, None)
    job = service.store.add(dummy_job(3), max_open=None)
    video = Service.video

    def end_meanwhile(self: Service, found: Job) -> Video:
        self.events.publish(found.id, {"status": "completed"}, is_final=True)
        return video(self, found)

    async def follow() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get(f"/v1/videos/{job.id}/events")).text

    monkeypatch.setattr(Service, "video", end_meanwhile)
    first, second = map(int, re.findall(r"^id: (\d+)$", asyncio.run(follow()), re.M))
    assert first < second
    service.store.close()


@pytest.mark.long
def test_no_reader_sees_a_job_as_it_was_before_a_change(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    id = add(store)
    num_attempts, is_over = [0], threading.Event()
    wrong: list[tuple[int, int]] = []
    num_at_hand = [0]

    def read() -> None:
        while not is_over.is_set():
            least = num_attempts[0]
            num_at_hand[0] += store.at_hand(id) is not None
            job = store.get(id)
            assert job is not None
            if job.attempts < least:
                wrong.append((job.attempts, least))

    readers = [threading.Thread(target=read) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for reader in readers:
            reader.start()
        for number in range(60):
            assert store.take_next() is not None
            assert store.put_back(id, counts=True)
            num_attempts[0] = number + 1
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(interval)
    assert not wrong
    assert num_at_hand[0]
    store.close()
    with pytest.raises(ClosedError):
        store.get(id)


def test_a_job_that_was_read_before_a_change_is_not_kept() -> None:
    cache, job = JobCache(max_jobs=2), new_job()
    before = cache.num_changes
    with cache.changes() as discard:
        discard(job.id)
        cache.keep(job, cache.num_changes)
        assert cache.get(job.id) is None
    cache.keep(job, before)
    assert cache.get(job.id) is None
    for each in (job, new_job(), new_job()):
        cache.keep(each, cache.num_changes)
    assert cache.get(job.id) is None, "it was used longest ago"
    assert cache.get(each.id) is each
