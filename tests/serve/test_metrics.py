"""What a server tells of its work, without a server: the metrics, and the view of its ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from svdpp.serve.engine import Rank, RankView
from svdpp.serve.job import JobState
from svdpp.serve.metrics import Metrics
from svdpp.worker.messages import ActionDone, Failed, Heartbeat, Joined, StepDone
from tests.serve.store_jobs import new_job


class Server:
    """What a scrape reads."""

    def __init__(self) -> None:
        self.jobs = dict.fromkeys(JobState, 0)
        self.oldest: float | None = None
        self.engine: Any = SimpleNamespace(restarts=0, live_ranks=2)
        queue: Any = SimpleNamespace(counts=lambda: self.jobs, oldest_waiting=lambda: self.oldest)
        self.metrics = Metrics(queue, self.engine)

    def value(self, name: str, **labels: object) -> float:
        wanted = {key: str(value) for key, value in labels.items()}
        families = text_string_to_metric_families(self.metrics.exposed().decode())
        samples = [sample for family in families for sample in family.samples]
        (found,) = (each.value for each in samples if (each.name, each.labels) == (name, wanted))
        return found


def test_the_queue_is_read_at_each_scrape() -> None:
    server = Server()
    assert server.value("svdpp_queue_age_seconds") == 0
    server.jobs[JobState.QUEUED] = 7
    server.oldest = time.time() - 60
    server.engine.restarts = 3
    assert server.value("svdpp_jobs", state="queued") == 7
    assert 60 <= server.value("svdpp_queue_age_seconds") < 600
    assert server.value("svdpp_restarts_total") == 3
    assert server.value("svdpp_live_ranks") == 2


def test_events_of_the_ranks_are_counted() -> None:
    server = Server()
    observe = server.metrics
    observe(1, Joined(device="cpu", load_seconds=1))
    for step in range(3):
        observe(1, StepDone(clip=0, step=step, seconds=0.2))
    observe(1, ActionDone(action="DENOISE c0 0:3", start=10.0, end=10.6, waited=1.0))
    observe(1, ActionDone(action="DECODE c0 @3", start=13.0, end=13.5, waited=0.4))

    assert server.value("svdpp_step_seconds_sum", rank=1) == pytest.approx(0.6)
    assert server.value("svdpp_step_seconds_bucket", rank=1, le="0.25") == 3
    seconds = {"compute": 1.1, "wait": 1.4, "idle": 2.0}
    for state, expected in seconds.items():
        found = server.value("svdpp_rank_seconds_total", rank=1, state=state)
        assert found == pytest.approx(expected), state


def test_the_service_scores_its_promises() -> None:
    server = Server()
    assert server.metrics.eta_error() == {"clips": 0, "median": None}
    for actual in (100.0, 110.0, 150.0):
        done = new_job(state=JobState.COMPLETED, started_at=1040.0, finished_at=1000.0 + actual)
        server.metrics.ended(replace(done, promised_seconds=100.0))
    server.metrics.ended(new_job(state=JobState.FAILED, finished_at=1050.0))
    # Without a promise there is nothing to score.
    server.metrics.ended(new_job(state=JobState.COMPLETED, finished_at=1050.0))

    assert server.value("svdpp_clips_total", state="completed") == 4
    assert server.value("svdpp_clips_total", state="failed") == 1
    assert server.value("svdpp_clips_total", state="cancelled") == 0
    assert server.value("svdpp_eta_error_ratio_bucket", le="0.1") == 2
    assert server.metrics.eta_error() == {"clips": 3, "median": 0.1}
    assert server.value("svdpp_clip_seconds_sum") == pytest.approx(60 + 70 + 110)


def test_a_mismatch_is_an_alert() -> None:
    server = Server()
    server.metrics.verified("equal")
    assert server.value("svdpp_verification_mismatch") == 0
    server.metrics.verified("different")

    assert server.value("svdpp_verification_mismatch") == 1
    assert server.value("svdpp_verifications_total", result="equal") == 1
    assert server.value("svdpp_verifications_total", result="different") == 1


def test_the_view_of_the_ranks_says_what_each_does_and_did() -> None:
    view = RankView(3, {7: "video_7"}.get)
    for rank in range(3):
        view.add(rank, Joined(device="cpu", load_seconds=1.0))
    view.add(0, Heartbeat(action="DENOISE c7 0:4"))
    view.add(0, StepDone(clip=7, step=0, seconds=0.1))
    view.add(1, Heartbeat(action="DENOISE c7 4:8", waiting=True))
    assert view.now() == [
        Rank(0, "cpu", "video_7", "denoise", 1, "compute"),
        Rank(1, "cpu", "video_7", "denoise", None, "wait"),
        Rank(2, "cpu", None, "", None, "idle"),
    ]
    (at_work,) = view.spans()
    assert (at_work.rank, at_work.video, at_work.kind) == (0, "video_7", "denoise")
    now = time.monotonic()
    view.add(0, ActionDone(action="DENOISE c7 0:4", start=now - 5, end=now, waited=0.0))
    view.add(2, ActionDone(action="DECODE c7 @8", start=now - 90, end=now - 80, waited=0.0))
    view.add(0, Heartbeat())
    (done,) = view.spans()
    assert round(done.end - done.start, 3) == 5
    view.add(0, Failed(error={}, traceback="", action="DECODE c5 @8", step=-1))
    assert view.clip_of(0) == 5
    view.reset()
    assert [rank.doing for rank in view.now()] == ["idle"] * 3
    assert view.spans() == [done]

    for _ in range(5000):
        view.add(0, ActionDone(action="DENOISE c7 0:4", start=now - 5, end=now, waited=0.0))
    assert len(view.spans()) == 1024
