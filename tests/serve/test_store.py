"""The queue stores jobs, and changes a state only from the states that allow it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.errors import RankError, RequestError
from svdpp.serve.job import Job, JobState, new_id
from svdpp.serve.queue import JobQueue, QueueFullError
from tests.serve.store_jobs import SAMPLING, add, new_job


@contextlib.contextmanager
def restarted(store: JobQueue, tmp_path: Path) -> Iterator[JobQueue]:
    """The store of the same folder, opened again."""
    store.close()
    with contextlib.closing(JobQueue(tmp_path / "data")) as again:
        yield again


def state_of(store: JobQueue, id: str) -> JobState:
    job = store.get(id)
    assert job is not None
    return job.state


def test_a_job_is_stored_as_it_is(store: JobQueue, tmp_path: Path) -> None:
    job = new_job(
        owner="ann",
        seed=2**63 - 1,
        sampling=replace(SAMPLING, fps=9, fit="crop", min_guidance_scale=0.1 + 0.2),
        photo_name="Füße 猫 '; DROP TABLE jobs; --.png",
        created_at=1763812345.678901,
        priority=9,
        idempotency_key="a key",
    )
    assert store.add(job, max_open=1) == job
    with restarted(store, tmp_path) as again:
        assert again.get(job.id) == job
        assert again.get(new_id()) is None


def test_a_job_from_request_to_removal(store: JobQueue) -> None:
    before = time.time()
    id = add(store)
    assert store.counts() == {**dict.fromkeys(JobState, 0), JobState.QUEUED: 1}
    assert store.set_promise(id, 12.5)

    taken = store.take_next()
    assert taken is not None
    assert (taken.id, taken.state) == (id, JobState.IN_PROGRESS)
    assert taken.started_at is not None
    assert before <= taken.started_at <= time.time()
    assert (store.waiting(), store.running()) == ([], [taken])

    assert store.complete(id, {"frames_sha256": "ab", "psnr": None})
    done = store.get(id)
    assert done is not None
    assert done == replace(
        taken,
        state=JobState.COMPLETED,
        finished_at=done.finished_at,
        metadata={"frames_sha256": "ab", "psnr": None},
    )
    assert done.promised_seconds == 12.5
    assert store.set_proof(id, "equal")
    assert [each.id for each in store.finished()] == [id]
    assert store.remove(id)
    assert store.get(id) is None
    assert store.photos() == {}


def test_a_failure_is_kept_with_its_details(store: JobQueue) -> None:
    id = add(store)
    store.take_next()
    assert store.fail(id, RankError("rank 1 died", "look", details={"rank": 1}))
    job = store.get(id)
    assert job is not None
    assert job.error == {
        "type": "RankError",
        "message": "rank 1 died",
        "hint": "look",
        "details": {"rank": 1},
    }


def test_a_failure_is_kept_whatever_its_details_are(store: JobQueue) -> None:
    id = add(store)
    store.take_next()
    details = {"sigma": float("nan"), "path": Path("x"), 3: [float("inf"), (1, 0.5)]}
    assert store.fail(id, {"message": "no", "details": details})
    job = store.get(id)
    assert job is not None
    assert job.error == {
        "message": "no",
        "details": {"sigma": None, "path": "x", "3": [None, [1, 0.5]]},
    }


def _changes(store: JobQueue) -> dict[str, Callable[[str], bool]]:
    return {
        "put_back": lambda id: store.put_back(id, counts=True),
        "complete": lambda id: store.complete(id, {"late": True}),
        "fail": lambda id: store.fail(id, {"message": "late"}),
        "cancel_waiting": store.cancel_waiting,
        "ask_to_cancel": store.ask_to_cancel,
        "cancelled": store.cancelled,
        "set_proof": lambda id: store.set_proof(id, "equal"),
        "remove": store.remove,
    }


ALLOWED = {
    JobState.QUEUED: {"cancel_waiting"},
    JobState.IN_PROGRESS: {"put_back", "complete", "fail", "ask_to_cancel", "cancelled"},
    JobState.COMPLETED: {"set_proof", "remove"},
    JobState.FAILED: {"remove"},
    JobState.CANCELLED: {"remove"},
}


def in_state(store: JobQueue, state: JobState) -> str:
    id = add(store)
    if state is not JobState.QUEUED:
        store.take_next()
    finish = {
        JobState.COMPLETED: lambda: store.complete(id, {}),
        JobState.FAILED: lambda: store.fail(id, {"message": "no"}),
        JobState.CANCELLED: lambda: store.cancelled(id),
    }
    if state in finish:
        assert finish[state]()
    assert state_of(store, id) is state
    return id


@pytest.mark.parametrize("state", list(JobState))
def test_what_a_state_does_not_allow_changes_nothing(store: JobQueue, state: JobState) -> None:
    """Among them: a completion after a cancellation, or after a failure."""
    for name, change in _changes(store).items():
        id = in_state(store, state)
        before = store.get(id)
        assert change(id) is (name in ALLOWED[state]), name
        assert (store.get(id) == before) is (name not in ALLOWED[state]), name
        for waiting, _ in store.waiting():
            store.cancel_waiting(waiting)


def test_nothing_brings_a_removed_job_back(store: JobQueue) -> None:
    id = in_state(store, JobState.CANCELLED)
    assert store.remove(id)
    for change in _changes(store).values():
        assert change(id) is False
    assert store.set_promise(id, 1.0) is False
    assert sum(store.counts().values()) == 0


def test_only_one_of_many_threads_ends_a_job(store: JobQueue) -> None:
    for _ in range(20):
        id = in_state(store, JobState.IN_PROGRESS)
        store.ask_to_cancel(id)
        ends = ("complete", "fail", "cancelled", "put_back") * 2
        with ThreadPoolExecutor(len(ends)) as threads:
            barrier = threading.Barrier(len(ends))

            def end(name: str, barrier: threading.Barrier = barrier, id: str = id) -> bool:
                barrier.wait()
                return _changes(store)[name](id)

            assert sum(threads.map(end, ends)) == 1
        assert state_of(store, id).is_final


def test_a_restart_puts_back_what_was_running(store: JobQueue, tmp_path: Path) -> None:
    ids = [add(store, created_at=float(index)) for index in range(4)]
    for _ in range(3):
        store.take_next()
    store.complete(ids[0], {})
    store.set_proof(ids[0], "running")
    store.ask_to_cancel(ids[1])
    with restarted(store, tmp_path) as again:
        assert [(job.id, job.state) for job in again.recover()] == [
            (ids[1], JobState.CANCELLED),
            (ids[2], JobState.QUEUED),
        ]
        assert [id for id, _ in again.waiting()] == ids[2:]
        back = again.get(ids[2])
        assert back is not None
        assert (back.started_at, back.attempts) == (None, 0)
        done = again.get(ids[0])
        assert done is not None
        assert (done.state, done.proof) == (JobState.COMPLETED, "running")
        assert again.to_prove() == [ids[0]]
        assert again.recover() == []


def test_putting_back_cancels_what_was_to_be_cancelled(store: JobQueue) -> None:
    id = in_state(store, JobState.IN_PROGRESS)
    assert store.ask_to_cancel(id)
    assert store.put_back(id, counts=True)
    job = store.get(id)
    assert job is not None
    assert job.state is JobState.CANCELLED
    assert job.finished_at is not None
    assert store.take_next() is None


def test_attempts_are_counted(store: JobQueue) -> None:
    id = add(store)
    for counts, attempts in ((True, 1), (False, 1), (True, 2)):
        store.take_next()
        assert store.put_back(id, counts=counts)
        job = store.get(id)
        assert job is not None
        assert job.attempts == attempts


def test_a_full_queue_refuses(store: JobQueue) -> None:
    ids = [store.add(new_job(), max_open=2).id for _ in range(2)]
    store.take_next()  # a job in progress is open, too
    with pytest.raises(QueueFullError) as full:
        store.add(new_job(), max_open=2)
    assert full.value.details == {"open": 2, "limit": 2}
    store.complete(ids[0], {})
    store.add(new_job(), max_open=2)


def test_an_owner_has_a_limit_of_its_own(store: JobQueue) -> None:
    for owner in ("a", "a", "b"):
        store.add(new_job(owner=owner), max_open=10, max_open_of_owner=2)
    with pytest.raises(QueueFullError) as full:
        store.add(new_job(owner="a"), max_open=10, max_open_of_owner=2)
    assert full.value.details == {"open": 2, "limit": 2, "owner": "a"}
    store.add(new_job(owner="b"), max_open=10, max_open_of_owner=2)


def test_threads_do_not_pass_the_limit_together(store: JobQueue) -> None:
    def ask(_: int) -> bool:
        try:
            store.add(new_job(), max_open=5)
        except QueueFullError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(ask, range(40))) == 5


def test_the_same_request_gives_the_same_job(store: JobQueue) -> None:
    first = store.add(new_job(idempotency_key="k"), max_open=1)
    again = new_job(idempotency_key="k", photo_name="renamed.png", created_at=2000.0)
    assert store.add(again, max_open=1) == first  # also if the queue is full meanwhile
    store.take_next()
    store.complete(first.id, {})
    assert store.add(again, max_open=1).state is JobState.COMPLETED
    assert store.add(replace(again, owner="other"), max_open=1).id == again.id


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"priority": 1},
        {"photo_sha256": "1" * 64},
        {"sampling": replace(SAMPLING, fps=8)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_used_key_refuses_another_request(store: JobQueue, other: dict[str, object]) -> None:
    first = add(store, idempotency_key="k")
    with pytest.raises(RequestError) as refused:
        add(store, idempotency_key="k", **other)
    assert refused.value.details == {"id": first, "field": next(iter(other))}
    assert sum(store.counts().values()) == 1


def test_threads_with_one_key_get_one_job(store: JobQueue) -> None:
    barrier = threading.Barrier(8)

    def ask(_: int) -> Job:
        barrier.wait()
        return store.add(new_job(idempotency_key="k"), max_open=1)

    with ThreadPoolExecutor(8) as threads:
        assert len({job.id for job in threads.map(ask, range(8))}) == 1
    assert store.counts()[JobState.QUEUED] == 1


def test_of_other_requests_with_one_key_one_becomes_a_job(store: JobQueue) -> None:
    barrier = threading.Barrier(8)

    def ask(seed: int) -> str | None:
        barrier.wait()
        try:
            return add(store, idempotency_key="k", seed=seed)
        except RequestError:
            return None

    with ThreadPoolExecutor(8) as threads:
        made = [id for id in threads.map(ask, range(8)) if id is not None]
    assert list(store.photos()) == made
    assert len(made) == 1


def test_a_removed_jobs_key_is_free_again(store: JobQueue) -> None:
    first = add(store, idempotency_key="k")
    store.cancel_waiting(first)
    store.remove(first)
    assert add(store, idempotency_key="k", seed=7) != first
