"""Server without running ranks: clips that the ranks cannot make, ETAs, and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from svdpp.config import ClipRequest, ParallelConfig, WanSampling
from svdpp.driver import resolve as memory
from svdpp.driver.clips import ClipProgress
from svdpp.driver.resolve import resolve_config
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.plan.actions import Action
from svdpp.plan.costs import CostModel
from svdpp.plan.forecast import simulate_schedule, steady_seconds_per_clip
from svdpp.plan.layout import Layout
from svdpp.serve.clips import Admission, RunningClip
from svdpp.serve.engine import RankMonitor, RankSnapshot
from svdpp.serve.fleet import Estimate, EtaEstimator
from svdpp.serve.job import JobState
from svdpp.serve.metrics import Metrics
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.schemas import to_api_error
from svdpp.serve.server import build
from svdpp.serve.service import Service
from svdpp.serve.settings import ServerSettings
from svdpp.worker.messages import ActionDone, ClipDone, Heartbeat, Joined, RankStats, StepDone
from tests.support.engines import (
    SAMPLING,
    STEPS,
    add,
    demo_config,
    dummy_config,
    dummy_job,
    job_of,
    new_job,
    take_all,
)

# --- clips that the ranks cannot make are refused or held -----------------------------------------


def test_steps_that_need_a_rank_without_weights() -> None:
    few, many = (replace(SAMPLING, num_inference_steps=steps) for steps in (2, 25))
    with pytest.raises(RequestError, match="started with `num_inference_steps` 2") as caught:
        Admission(
            dummy_config(4, parallel=ParallelConfig(split="alternating"), sampling=few), None
        ).check(many)
    error = to_api_error(caught.value)
    assert error.hint == "use 2 steps"
    assert error.details["field"] == "steps"
    Admission(
        dummy_config(4, parallel=ParallelConfig(split="alternating"), sampling=many), None
    ).check(many)


@pytest.mark.slow
def test_a_clip_that_is_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config, checkpoint = resolve_config(demo_config())
    gate = Admission(config, checkpoint)
    large = replace(config.sampling, width=128, height=128, num_frames=1024, decode_chunk_size=1024)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    with pytest.raises(OutOfMemoryError, match="out of memory before the run"):
        gate.check(large)
    # A clip of the size for which the server was started fits, even with little free memory,
    # because the ranks already hold the memory for it.
    gate.check(config.sampling)
    gate.check(replace(config.sampling, num_inference_steps=2))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**50)
    gate.check(large)


def unstarted_service(folder: Path, world_size: int = 2) -> Service:
    """Return the `Service` of a dummy model's server that is not started, so it has no ranks."""
    config = dummy_config(world_size)
    settings = ServerSettings(config=config, folder=folder, sizes=((64, 64),), max_open=9)
    return build(settings, None)[1]


def test_what_is_held_says_why(tmp_path: Path) -> None:
    """A held job names its reason: another model, other weights, or steps that the ranks cannot
    divide.
    """
    with closing(JobQueue(tmp_path)) as queue:
        add(queue, model="dummy")
        other = add(queue, model="b", sampling=WanSampling())
        newer = add(queue, model="dummy", weights="2" * 64)
        odd = add(queue, model="dummy", sampling=replace(SAMPLING, num_inference_steps=6))
    why: dict[str, str | None] = {
        other: "its model is b, and this server runs dummy",
        newer: "its model is dummy, and this server runs other weights of it",
        odd: None,
    }
    service = unstarted_service(tmp_path)
    with closing(service.queue) as queue:
        assert {id: service.video(job_of(queue, id)).held for id in why} == why
    service = unstarted_service(tmp_path, world_size=4)
    with closing(service.queue) as queue:
        assert "6" in (service.video(job_of(queue, odd)).held or "")
        assert odd not in take_all(queue)
    with closing(unstarted_service(tmp_path).queue) as queue:
        assert odd in take_all(queue)


def test_held_jobs_take_no_place_and_can_be_cancelled(store: JobQueue) -> None:
    id = add(store, model="b", created_at=1.0)
    store.model_key = "a"
    assert store.oldest_waiting() is None
    store.add(new_job(model="a", created_at=2.0), max_open=1, max_open_of_owner=1)
    with pytest.raises(QueueFullError):
        store.add(new_job(model="a"), max_open=1)
    assert store.oldest_waiting() == 2.0
    assert store.cancel_waiting(id)


# --- ETAs: the work before a clip, divided among all ranks, and the clip's own work -------------

HALF = replace(SAMPLING, width=SAMPLING.width // 2)


def _running_clip(
    index: int, steps_done: int | None, passed: float = 0.0, **values: Any
) -> RunningClip:
    """Return a `RunningClip`. `steps_done` is None if no rank has begun the clip.

    `passed` is the number of seconds since the clip's last event.
    """
    clip = RunningClip(dummy_job(index, **values), ClipRequest(seed=0), {})
    rank = None if steps_done is None else 0
    handle: Any = SimpleNamespace(progress=ClipProgress(steps_done or 0, STEPS, rank))
    return replace(clip, handle=handle, progressed_at=time.monotonic() - passed)


@pytest.fixture
def estimates(store: JobQueue, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EtaEstimator]:
    """Function that returns the ETA estimator of a server whose ranks have the given clips.

    A clip takes 1 s to encode, 2 s for each step, and 4 s to decode.
    """
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)

    def of_server(
        *clips: RunningClip, ranks: int = 1, servers: int = 1, preparing: Any = None
    ) -> EtaEstimator:
        dispatcher = SimpleNamespace(
            clips=lambda: list(clips),
            preparing=preparing,
            num_free_slots=2,
            recent_jobs={0: dummy_job(0)},
        )
        config = SimpleNamespace(world_size=ranks, parallel=ParallelConfig())
        engine: Any = SimpleNamespace(dispatcher=dispatcher, config=config)
        found = EtaEstimator(store, engine, lambda: servers)
        for seconds in (9.0, 2.0, 2.0):  # the first step is slow, because the rank warms up
            found(0, StepDone(clip=0, step=1, seconds=seconds))
        for action, seconds in (("ENCODE c0 @0", 1.0), ("DECODE c0 @8", 4.0)):
            end = 1.0 + seconds
            found(0, ActionDone(action=Action.parse(action), start=1.0, end=end, waited=0.0))
        return found

    return of_server


WHOLE = 1 + 2 * STEPS + 4


@pytest.mark.parametrize(("ranks", "servers"), [(1, 1), (4, 1), (2, 3)])
def test_clips_that_wait_share_all_ranks_in_the_order_of_their_turns(
    store: JobQueue, estimates: Callable[..., EtaEstimator], ranks: int, servers: int
) -> None:
    for seed in range(7):
        store.add(dummy_job(seed), max_open=None)
    found = estimates(ranks=ranks, servers=servers).estimate_all()
    assert list(found) == [id for id, _ in store.waiting()]
    assert [one.queue_position for one in found.values()] == list(range(7))
    expected = [WHOLE * (1 + place / (ranks * servers)) for place in range(7)]
    assert [one.eta_seconds for one in found.values()] == pytest.approx(expected)


def test_the_busiest_rank_sets_the_pace_and_a_written_file_is_the_end(
    store: JobQueue, estimates: Callable[..., EtaEstimator]
) -> None:
    """ETAs follow the busiest rank, and include the time to write the file.

    Each of the two ranks does half of the steps. Rank 1 also decodes, so rank 0 waits for it.
    """
    for seed in range(3):
        store.add(dummy_job(seed), max_open=None)
    made = estimates(ranks=2)
    made._recent_work.clear()
    layout = Layout(
        num_steps=STEPS, world_size=2, costs=CostModel(step_seconds=2, decode_seconds=4)
    )
    for rank, action, start, end in simulate_schedule(layout.schedule(3), layout.costs):
        made(rank, ActionDone(action=action, start=start, end=end, waited=0.0))
    etas = [one.eta_seconds or 0.0 for one in made.estimate_all().values()]
    period = steady_seconds_per_clip(layout)
    work = etas[0]
    assert period == pytest.approx(STEPS + 4)
    assert etas[1] - etas[0] == pytest.approx(work * period / (2 * STEPS + 4))
    made(1, ClipDone(clip=0, metadata={}, write_seconds=3.0))
    first = next(iter(made.estimate_all(max_age=-1).values()))
    assert first.eta_seconds == pytest.approx(work + 3)


def test_the_etas_follow_ranks_that_become_slower_within_few_clips(
    store: JobQueue, estimates: Callable[..., EtaEstimator]
) -> None:
    """If the ranks become half as fast after 200 clips, the ETAs are right again after 5 clips."""
    job = store.add(dummy_job(0), max_open=None)
    made = estimates()

    def finish(num_clips: int, speed: float) -> None:
        for _ in range(num_clips):
            for kind, seconds in (("ENCODE c0 @0", 1.0), ("DECODE c0 @8", 4.0)):
                action = Action.parse(kind)
                made(0, ActionDone(action=action, start=0.0, end=seconds / speed, waited=0.0))
            for step in range(STEPS):
                made(0, StepDone(clip=0, step=step, seconds=2.0 / speed))

    finish(200, 1.0)
    finish(5, 0.5)
    found = made.estimate_all(max_age=-1)[job.id]
    assert found.eta_seconds == pytest.approx(2 * WHOLE)


@pytest.mark.parametrize(
    ("steps_done", "passed", "left"),
    [(0, 0.5, WHOLE - 0.5), (0, 99, WHOLE - 3), (5, 1, 9), (5, 99, 8), (STEPS, 3, 1)],
)
def test_of_a_clip_at_work_its_rest_counts_until_its_next_event(
    estimates: Callable[..., EtaEstimator], steps_done: int, passed: float, left: float
) -> None:
    clip = _running_clip(1, steps_done, passed)
    found = estimates(clip).estimate_all()[clip.job.id]
    assert found.queue_position is None
    assert found.eta_seconds == pytest.approx(left)


def test_the_next_clip_begins_once_the_first_rank_is_free(
    store: JobQueue, estimates: Callable[..., EtaEstimator]
) -> None:
    begun, following = _running_clip(0, 1), _running_clip(1, None)
    waiting = store.add(dummy_job(2, sampling=HALF), max_open=None)
    found = estimates(begun, following, ranks=4).estimate_all()
    free = WHOLE / 4 - 1 - 2
    assert found[following.job.id].eta_seconds == pytest.approx(free + WHOLE)
    expected = free + WHOLE / 4 + WHOLE / 2
    assert found[waiting.id].eta_seconds == pytest.approx(expected)
    assert [one.queue_position for one in found.values()] == [None, 0, 1]


def test_others_go_before_a_large_image(
    store: JobQueue, estimates: Callable[..., EtaEstimator]
) -> None:
    jobs = [store.add(dummy_job(seed), max_open=None) for seed in range(4)]
    large = store.claim()
    assert large is not None
    prepared_at = time.monotonic() + 100
    preparing = replace(_running_clip(0, None), job=large, prepared_at=prepared_at)
    found = estimates(preparing=preparing).estimate_all()
    assert [found[job.id].queue_position for job in jobs] == [2, 0, 1, 3]
    etas = [found[job.id].eta_seconds for job in jobs]
    assert etas == pytest.approx([3 * WHOLE + 100, WHOLE, 2 * WHOLE, 4 * WHOLE + 100])


def test_before_a_step_is_measured_there_are_places_alone(
    store: JobQueue, estimates: Callable[..., EtaEstimator]
) -> None:
    job = store.add(dummy_job(1), max_open=None)
    own = estimates()
    assert own.remote_eta(replace(job, step=5)) == pytest.approx(2 * (STEPS - 5) + 4)
    own._samples["step"].clear()
    assert own.estimate(job.id) == Estimate(0, None)
    assert own.remote_eta(job) is None
    assert own.seconds_until_slot() == 5.0


# --- metrics --------------------------------------------------------------------------------------


class ScrapedMetrics:
    """Prometheus metrics of a service whose queue and engine are stand-ins."""

    def __init__(self) -> None:
        self.jobs = dict.fromkeys(JobState, 0)
        self.oldest: float | None = None
        config = SimpleNamespace(world_size=2)
        self.engine: Any = SimpleNamespace(restarts=0, state="ready", config=config)
        queue: Any = SimpleNamespace(
            counts=lambda: self.jobs,
            oldest_waiting=lambda: self.oldest,
            now=time.time,
            num_unreadable=0,
        )
        self.metrics = Metrics(queue, self.engine)

    def value(self, name: str, **labels: object) -> float:
        wanted = {key: str(value) for key, value in labels.items()}
        families = text_string_to_metric_families(self.metrics.render().decode())
        samples = [sample for family in families for sample in family.samples]
        (found,) = (each.value for each in samples if (each.name, each.labels) == (name, wanted))
        return found


def test_the_queue_is_read_at_each_scrape() -> None:
    server = ScrapedMetrics()
    assert server.value("svdpp_queue_age_seconds") == 0
    server.jobs[JobState.QUEUED] = 7
    server.oldest = time.time() - 60
    server.engine.restarts = 3
    assert server.value("svdpp_jobs", state="queued") == 7
    assert 60 <= server.value("svdpp_queue_age_seconds") < 600
    assert server.value("svdpp_restarts_total") == 3
    assert server.value("svdpp_live_ranks") == 2


def test_events_of_the_ranks_are_counted() -> None:
    server = ScrapedMetrics()
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


def test_the_last_sample_of_each_rank_is_shown() -> None:
    server = ScrapedMetrics()
    observe = server.metrics
    first = RankStats(sent_bytes=70, received_bytes=5, resident_bytes=300)
    observe(0, first)
    observe(0, first.model_copy(update={"sent_bytes": 90, "gpu_load": 0.5, "gpu_watts": 412.0}))
    assert server.value("svdpp_rank_moved_bytes_total", rank=0, direction="sent") == 90
    assert server.value("svdpp_rank_resident_bytes", rank=0) == 300
    assert server.value("svdpp_rank_gpu_load_ratio", rank=0) == 0.5
    assert server.value("svdpp_rank_gpu_power_watts", rank=0) == 412
    observe(0, first.model_copy(update={"sent_bytes": 1}))  # the rank has restarted
    assert server.value("svdpp_rank_moved_bytes_total", rank=0, direction="sent") == 91
    with pytest.raises(ValueError, match="unpack"):
        server.value("svdpp_rank_gpu_load_ratio", rank=0)


def test_the_service_compares_etas_and_counts_verifications() -> None:
    """Metrics compare estimated and actual times, and count verifications.

    A verification that finds a difference sets the metric `svdpp_verification_mismatch`.
    """
    server = ScrapedMetrics()
    assert server.metrics.eta_error() == {"clips": 0, "median": None}
    for actual in (100.0, 110.0, 150.0):
        done = new_job(state=JobState.COMPLETED, started_at=1040.0, finished_at=1000.0 + actual)
        server.metrics.count_final_job(replace(done, eta_seconds=100.0))
    server.metrics.count_final_job(new_job(state=JobState.FAILED, finished_at=1050.0))
    # This job has no estimated time, so the metric of ETA errors ignores it.
    server.metrics.count_final_job(new_job(state=JobState.COMPLETED, finished_at=1050.0))

    assert server.value("svdpp_clips_total", state="completed") == 4
    assert server.value("svdpp_clips_total", state="failed") == 1
    assert server.value("svdpp_eta_error_ratio_bucket", le="0.1") == 2
    assert server.metrics.eta_error() == {"clips": 3, "median": 0.1}
    assert server.value("svdpp_clip_seconds_sum") == pytest.approx(60 + 70 + 110)

    for status, mismatch in (("equal", 0), ("different", 1)):
        server.metrics.count_verification(status)
        assert server.value("svdpp_verifications_total", result=status) == 1
        assert server.value("svdpp_verification_mismatch") == mismatch


def test_the_view_of_the_ranks_says_what_each_does_and_did() -> None:
    view = RankMonitor(3, {7: "video_7"}.get)
    for rank in range(3):
        view.add(rank, Joined(device="cpu", load_seconds=1.0))
    view.add(0, Heartbeat(action="DENOISE c7 0:4"))
    view.add(0, StepDone(clip=7, step=0, seconds=0.1))
    view.add(1, Heartbeat(action="DENOISE c7 4:8", waiting=True))
    assert view.snapshot() == [
        RankSnapshot(0, "cpu", "video_7", "denoise", 1, "compute"),
        RankSnapshot(1, "cpu", "video_7", "denoise", None, "wait"),
        RankSnapshot(2, "cpu", None, "", None, "idle"),
    ]
    (at_work,) = view.spans()
    assert (at_work.rank, at_work.video, at_work.kind) == (0, "video_7", "denoise")
    now = time.monotonic()
    view.add(0, ActionDone(action="DENOISE c7 0:4", start=now - 5, end=now, waited=0.0))
    view.add(2, ActionDone(action="DECODE c7 @8", start=now - 90, end=now - 80, waited=0.0))
    view.add(0, Heartbeat())
    (done,) = view.spans()
    assert round(done.end - done.start, 3) == 5
    view.reset()
    assert [rank.doing for rank in view.snapshot()] == ["idle"] * 3
    assert view.spans() == [done]

    for _ in range(5000):
        view.add(0, ActionDone(action="DENOISE c7 0:4", start=now - 5, end=now, waited=0.0))
    assert len(view.spans()) == 1024
