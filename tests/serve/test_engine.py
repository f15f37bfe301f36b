"""The engine makes every job of the queue once, whatever happens to its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from svdpp.serve.job import JobState
from tests.serve.engines import dummy_config, hashes, latents, serving

pytestmark = pytest.mark.processes


def test_every_job_is_made_once_in_order(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(2)) as service:
        ids = service.add(*range(12))
        jobs = service.wait_final(ids)
        assert service.engine.state == "ready"
        assert service.engine.restarts == 0
        service.wait(lambda: service.engine.is_idle, "it is not idle")
        assert [rank.doing for rank in service.engine.ranks()] == ["idle", "idle"]
        assert {span.rank for span in service.engine.spans()} == {0, 1}
        assert {span.video for span in service.engine.spans()} == set(ids)
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert [job.id for job in service.ended] == ids
    assert latents(jobs) == hashes(dummy_config(2), list(range(12)))
    assert list((tmp_path / "latents").iterdir()) == []
