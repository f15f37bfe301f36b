"""A server under torchrun, which sends SIGTERM to all ranks at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue
from tests.serve.http_server import DUMMY, HttpServer

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.processes, pytest.mark.long]


def test_the_clip_in_progress_is_finished_within_the_grace(tmp_path: Path) -> None:
    launcher = (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--log-dir", str(tmp_path / "log"), "--shutdown-timeout", "100"),
    )
    options = (*DUMMY, "--time-scale", "0.3", "--grace", "100")
    with HttpServer(tmp_path / "data", *options, launcher=launcher) as server:
        server.wait_ready()
        (id,) = server.add()
        server.wait_for(id, "in_progress")
        server.stop(signal.SIGTERM)
        assert "SignalException" in server.err, "torchrun itself ends by the signal"
    store = JobQueue(tmp_path / "data")
    job = store.get(id)
    store.close()
    assert job is not None
    assert job.state is JobState.COMPLETED
