"""Queue of jobs: storage, allowed changes of state, limits, and the order of owners' jobs."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.errors import RankError, RequestError
from svdpp.serve import job, postgres, sqlite
from svdpp.serve.job import JobState, column_of, new_id
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.queue_sql import AGEING_SECONDS
from tests.support.engines import SAMPLING, add, in_state, job_of, new_job, take_all, taken


@pytest.fixture
def store(each_store: JobQueue) -> JobQueue:
    return each_store


def waiting(store: JobQueue) -> list[str]:
    return [id for id, _ in store.waiting()]


def test_a_job_is_stored_as_it_is(store: JobQueue, tmp_path: Path, queue_url: str | None) -> None:
    job = new_job(
        owner="ann",
        seed=2**63 - 1,
        sampling=replace(SAMPLING, fps=9, fit="crop", min_guidance_scale=0.1 + 0.2),
        remarks=["'a.png' is stretched", "Füße"],
        input_name="Füße 猫 '; DROP TABLE jobs; --.png",
        created_at=1763812345.678901,
        priority=9,
        idempotency_key="a key",
        callback_url="https://example.org/a?b=c",
    )
    assert store.add(job, max_open=1) == job
    store.close()
    with contextlib.closing(JobQueue(tmp_path / "data", url=queue_url)) as again:
        assert again.get(job.id) == job
        assert again.get(new_id()) is None


def test_tables_of_the_version_before_are_upgraded_beside_a_running_server(
    store: JobQueue, tmp_path: Path, queue_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version adds its columns to the tables.

    In PostgreSQL, a running server of the older version keeps working. A SQLite file has only one
    server at a time.
    """
    first, newest = add(store), job.VERSION + 1
    if queue_url is None:
        store.close()
    added = "ALTER TABLE jobs ADD COLUMN more INTEGER NOT NULL DEFAULT 7;\n"
    with monkeypatch.context() as patch:
        for module in (job, sqlite, postgres):
            patch.setattr(module, "VERSION", newest)
        patch.setattr(job, "_ADDED", {newest: added})
        for _ in range(2):  # the second pass has nothing to upgrade
            with contextlib.closing(JobQueue(tmp_path / "data", url=queue_url)) as newer:
                assert newer.backend.fetch_all("SELECT id, more FROM jobs") == [(first, 7)]
    if queue_url is not None:
        ids = [first, add(store)]
        assert take_all(store) == ids
    with pytest.raises(RequestError, match=f"version {newest}, and this svdpp"):
        JobQueue(tmp_path / "data", url=queue_url)


def test_a_job_from_request_to_removal(store: JobQueue) -> None:
    before = time.time()
    id = add(store)
    assert store.counts() == {**dict.fromkeys(JobState, 0), JobState.QUEUED: 1}
    assert store.set_eta(id, 12.5)
    begun = taken(store)
    assert (begun.id, begun.state) == (id, JobState.IN_PROGRESS)
    assert before <= (begun.started_at or 0) <= time.time()
    assert (store.waiting(), store.running()) == ([], [begun])
    metadata = {"file_sha256": "ab", "psnr": None}
    assert store.complete(id, metadata, job_of(store, id).fencing_token)
    done = job_of(store, id)
    ended = {"state": JobState.COMPLETED, "finished_at": done.finished_at, "metadata": metadata}
    assert done == replace(begun, **ended)
    assert done.eta_seconds == 12.5
    assert store.unverified() == [id]
    assert store.set_verification(id, "equal")
    assert store.unverified() == []
    assert store.finished() == {id: done.finished_at}
    assert store.remove(id)
    assert store.get(id) is None
    assert store.clip_tokens() == {}


def test_a_failure_is_kept_with_details_that_json_does_not_have(store: JobQueue) -> None:
    id = in_state(store, JobState.IN_PROGRESS)
    error = RankError("rank 1 died", "look", details={"x": float("nan"), "p": Path("x"), 3: [1]})
    assert store.fail(id, error, job_of(store, id).fencing_token)
    about = {"type": "RankError", "message": "rank 1 died", "hint": "look"}
    assert job_of(store, id).error == {**about, "details": {"x": None, "p": "x", "3": [1]}}


def _changes(store: JobQueue) -> dict[str, Callable[[str], bool]]:
    return {
        "requeue": lambda id: store.requeue(id, job_of(store, id).fencing_token, counts=True),
        "complete": lambda id: store.complete(id, {"late": True}, job_of(store, id).fencing_token),
        "fail": lambda id: store.fail(id, RequestError("late"), job_of(store, id).fencing_token),
        "cancel_waiting": store.cancel_waiting,
        "request_cancel": store.request_cancel,
        "mark_cancelled": lambda id: store.mark_cancelled(id, job_of(store, id).fencing_token),
        "set_verification": lambda id: store.set_verification(id, "equal"),
        "remove": store.remove,
    }


ALLOWED = {
    JobState.QUEUED: {"cancel_waiting"},
    JobState.IN_PROGRESS: {"requeue", "complete", "fail", "request_cancel", "mark_cancelled"},
    JobState.COMPLETED: {"set_verification", "remove"},
    JobState.FAILED: {"remove"},
    JobState.CANCELLED: {"remove"},
}


@pytest.mark.parametrize("state", list(JobState))
def test_what_a_state_does_not_allow_changes_nothing(store: JobQueue, state: JobState) -> None:
    """A change that the job's state does not allow has no effect.

    An example is a completion after a cancellation or after a failure.
    """
    for name, change in _changes(store).items():
        id = in_state(store, state)
        before = store.get(id)
        assert change(id) is (name in ALLOWED[state]), name
        assert (store.get(id) == before) is (name not in ALLOWED[state]), name
        for other in waiting(store):
            store.cancel_waiting(other)


def test_only_one_of_many_threads_ends_a_job(store: JobQueue) -> None:
    ends = ("complete", "fail", "mark_cancelled", "requeue") * 2
    for _ in range(20):
        id = in_state(store, JobState.IN_PROGRESS)
        store.request_cancel(id)
        assert sum(at_once(8, lambda n, id=id: _changes(store)[ends[n]](id))) == 1  # type: ignore[misc]
        assert job_of(store, id).state.is_final


def at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Call `call(0)` to `call(count - 1)` at the same time, in threads; return all results."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait()
        return call(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


def test_a_restart_puts_back_what_was_running(tmp_path: Path) -> None:
    store = JobQueue(tmp_path / "data")
    ids = [add(store, created_at=float(index)) for index in range(4)]
    for _ in range(3):
        store.claim()
    store.complete(ids[0], {}, job_of(store, ids[0]).fencing_token)
    store.set_verification(ids[0], "running")
    store.request_cancel(ids[1])
    store.close()
    with contextlib.closing(JobQueue(tmp_path / "data")) as again:
        assert [(job.id, job.state) for job in again.requeue_expired()] == [
            (ids[1], JobState.CANCELLED),
            (ids[2], JobState.QUEUED),
        ]
        assert waiting(again) == ids[2:]
        back, done = job_of(again, ids[2]), job_of(again, ids[0])
        assert (back.started_at, back.attempts) == (None, 0)
        assert (done.state, done.verification) == (JobState.COMPLETED, "running")
        assert [*again.pending_verifications()] == [ids[0]]
        assert again.requeue_expired() == []


def test_putting_back_counts_attempts_and_cancels_what_was_to_be_cancelled(store: JobQueue) -> None:
    id = add(store)
    for counts, attempts in ((True, 1), (False, 1), (True, 2)):
        store.claim()
        assert store.requeue(id, job_of(store, id).fencing_token, counts=counts)
        assert job_of(store, id).attempts == attempts
    store.claim()
    assert store.request_cancel(id)
    assert store.requeue(id, job_of(store, id).fencing_token, counts=True)
    assert job_of(store, id).state is JobState.CANCELLED
    assert job_of(store, id).finished_at is not None
    assert store.claim() is None


def test_a_full_queue_refuses(store: JobQueue) -> None:
    ids = [store.add(new_job(owner="a"), max_open=2).id for _ in range(2)]
    store.claim()  # a job in progress counts as open too
    with pytest.raises(QueueFullError) as full:
        store.add(new_job(), max_open=2)
    assert full.value.details == {"open": 2, "limit": 2}
    with pytest.raises(QueueFullError) as full:
        store.add(new_job(owner="a"), max_open=10, max_open_of_owner=2)
    assert full.value.details == {"open": 2, "limit": 2, "owner": "a"}
    store.add(new_job(owner="b"), max_open=10, max_open_of_owner=2)
    store.complete(ids[0], {}, job_of(store, ids[0]).fencing_token)
    store.add(new_job(owner="a"), max_open=3)


def test_the_same_request_gives_the_same_job(store: JobQueue) -> None:
    first = store.add(new_job(idempotency_key="k"), max_open=1)
    again = new_job(idempotency_key="k", input_name="renamed.png", created_at=2000.0)
    assert store.add(again, max_open=1) == first  # even though the queue is full
    store.claim()
    store.complete(first.id, {}, job_of(store, first.id).fencing_token)
    assert store.add(again, max_open=1).state is JobState.COMPLETED
    assert store.add(replace(again, owner="other"), max_open=1).id == again.id
    store.remove(first.id)
    assert add(store, idempotency_key="k", seed=7) != first.id, "a removed job's key is free"


def test_a_used_key_refuses_another_request(store: JobQueue) -> None:
    first = add(store, idempotency_key="k")
    for field, value in {
        **{"seed": 2, "priority": 1, "input_sha256": "1" * 64, "prompt": "a cat"},
        **{"sampling": replace(SAMPLING, fps=8), "callback_url": "http://a/"},
    }.items():
        with pytest.raises(RequestError) as refused:
            add(store, idempotency_key="k", **{field: value})
        assert refused.value.details == {"id": first, "field": column_of(field)}
    assert sum(store.counts().values()) == 1


@pytest.mark.parametrize("are_alike", [True, False])
def test_threads_with_one_key_get_one_job(store: JobQueue, are_alike: bool) -> None:
    def ask(number: int) -> str | None:
        try:
            return add(store, idempotency_key="k", seed=0 if are_alike else number)
        except RequestError:
            return None

    ids = at_once(8, ask)
    assert len(set(ids) - {None}) == 1
    assert (None in ids) is not are_alike
    assert store.counts()[JobState.QUEUED] == 1


def test_no_job_is_taken_twice(store: JobQueue) -> None:
    ids = {add(store, owner=f"owner{number % 7}") for number in range(200)}
    taken = [id for ids in at_once(8, lambda _: take_all(store)) for id in ids]
    assert len(taken) == len(ids)
    assert set(taken) == ids


#: By test's name: jobs as (owner, time of the request, priority), and the jobs' indices in the
#: order of claims.
ORDERS = {
    "owners take turns": (
        [("many", float(t), 0) for t in range(6)]
        + [("one", 100.0, 0), ("two", 101.0, 0), ("two", 102.0, 0)],
        [0, 6, 7, 1, 8, 2, 3, 4, 5],
    ),
    "higher priorities go first until others have waited": (
        [
            *(("a", 0.0, 0), ("a", 9 * AGEING_SECONDS - 1, 9)),
            *(("a", 9 * AGEING_SECONDS + 1, 9), ("a", 3 * AGEING_SECONDS, 2)),
        ],
        [1, 0, 2, 3],
    ),
    "a priority does not pass other owners": (
        [("a", 5.0, 9), ("a", 6.0, 9), ("a", 7.0, 9), ("b", 6.0, 0)],
        [0, 3, 1, 2],
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order(store: JobQueue, name: str) -> None:
    jobs, order = ORDERS[name]
    ids = [add(store, owner=owner, created_at=at, priority=level) for owner, at, level in jobs]
    expected = [ids[number] for number in order]
    assert waiting(store) == expected
    assert take_all(store) == expected


def test_an_owner_with_one_job_at_a_time_does_not_come_first_each_time(store: JobQueue) -> None:
    first = add(store, owner="a", created_at=1.0)
    assert take_all(store) == [first]
    other = add(store, owner="b", created_at=3.0)
    second = add(store, owner="a", created_at=2.0)
    assert take_all(store) == [other, second]


@pytest.mark.parametrize("seed", range(8))
def test_the_order_that_is_shown_is_the_order_that_is_taken(store: JobQueue, seed: int) -> None:
    """Jobs are claimed in the order that is shown. Requeued jobs keep their places."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 15)):
        owner, age = chance.choice("abcd"), chance.uniform(0, 5000)
        add(store, owner=owner, created_at=age, priority=chance.randint(0, 9))
    order = waiting(store)
    taken = [job.id for _ in range(5) if (job := store.claim())]
    assert taken == order[:5]
    assert [job.id for job in store.running()] == taken
    for id in chance.sample(taken, len(taken)):
        store.requeue(id, job_of(store, id).fencing_token, counts=False)
    assert waiting(store) == order
    store.claim()
    add(store, owner="a", created_at=1.0, priority=chance.randint(0, 9))
    expected = waiting(store)
    assert take_all(store) == expected


def test_pages_go_through_all_jobs_of_an_owner(store: JobQueue) -> None:
    ids = [add(store, owner="ab"[number % 2], created_at=5.0) for number in range(10)]
    store.cancel_waiting(ids[4])

    def pages(**choice: Any) -> list[str]:
        listed: list[str] = []
        while page := store.page(limit=3, after=listed[-1] if listed else None, **choice):
            assert len(page) <= 3
            listed += [job.id for job in page]
        return listed

    assert pages(owner="a") == ids[::2][::-1]
    assert pages(owner="a", order="asc") == ids[::2]
    assert pages(owner="a", states=[JobState.CANCELLED]) == [ids[4]]
    assert pages(owner="a", states=[JobState.QUEUED]) == [ids[8], ids[6], ids[2], ids[0]]
    assert pages(owner="c") == []
    assert store.page(owner="a", limit=3, after=new_id()) == []
