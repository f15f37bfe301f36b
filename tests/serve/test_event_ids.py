"""A status call that is answered from memory says what the queue's file says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import httpx

from svdpp.serve.job import Job
from svdpp.serve.server import build
from svdpp.serve.service import ServerSettings, Service
from svdpp.serve.views import Video
from tests.serve.engines import dummy_config, dummy_job


def test_the_first_event_of_a_stream_has_the_smallest_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the clip ends while its present state is read for that event."""
    settings = ServerSettings(
        config=dummy_config(2, step_seconds=0.01), folder=tmp_path, sizes=((64, 64),), max_open=9
    )
    app, service = build(settings, None)
    job = service.queue.add(dummy_job(3), max_open=None)
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
    service.queue.close()
