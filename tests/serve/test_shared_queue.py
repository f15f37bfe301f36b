"""Queues of several servers over one PostgreSQL: leases, fencing tokens, who takes what."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from svdpp.cli.options.serve import ServeOptions
from svdpp.errors import OutputError, RequestError
from svdpp.serve.job import Job, JobState
from svdpp.serve.queue import JobQueue
from tests.faults.processes import wait_until
from tests.serve.postgres import Postgres
from tests.serve.store_jobs import add, take_all

pytestmark = pytest.mark.long

Open = Callable[..., JobQueue]
_LEASE = 0.3


@pytest.fixture
def opened(tmp_path: Path, database: str) -> Iterator[Open]:
    """Opens one more queue over the same database and folder."""
    with contextlib.ExitStack() as queues:

        def another(**settings: float) -> JobQueue:
            queue = JobQueue(tmp_path / "data", url=database, **{"lease_seconds": 30.0, **settings})
            return queues.enter_context(contextlib.closing(queue))

        yield another


def taken(queue: JobQueue) -> Job:
    job = queue.take_next()
    assert job is not None
    return job


def recovered(queue: JobQueue) -> list[Job]:
    """What another server's lost leases were of."""
    found: list[Job] = []
    wait_until(lambda: found.extend(queue.recover()) or found, 30, lambda: "no lease ends")
    return found


def test_no_job_is_taken_twice(opened: Open) -> None:
    queues = [opened() for _ in range(4)]
    ids = {add(queues[0], owner=f"owner{number % 3}") for number in range(60)}
    with ThreadPoolExecutor(len(queues)) as threads:
        found = [id for ids in threads.map(take_all, queues) for id in ids]
    assert len(found) == len(ids)
    assert set(found) == ids
    assert sorted(job.token for job in queues[0].running()) == [1] * 60


def test_servers_take_the_turns_of_owners_together(opened: Open) -> None:
    first, second = opened(), opened()
    many = [add(first, owner="many", created_at=float(age)) for age in range(4)]
    one = add(second, owner="one", created_at=9.0)
    assert [taken(queue).id for queue in (first, second, second)] == [many[0], one, many[1]]


def test_a_lost_claim_ends_nothing(opened: Open) -> None:
    """Whatever the server does that was stopped for too long."""
    slow, other = opened(lease_seconds=_LEASE), opened(lease_seconds=_LEASE)
    id = add(slow)
    assert taken(slow).token == 1
    assert [(job.id, job.state, job.token) for job in recovered(other)] == [
        (id, JobState.QUEUED, 1)
    ]
    for end in (slow.cancelled, lambda id: slow.complete(id, {"stale": True})):
        slow._claims[id] = 1
        assert not end(id)
    now = taken(other)
    assert (now.id, now.token, now.server) == (id, 2, other.server)
    slow._claims[id] = 1
    assert slow.renew(lambda _: 0) == [id]
    slow._claims[id] = 1
    assert not slow.complete(id, {"stale": True})
    slow._claims[id] = 1
    assert not slow.fail(id, {"message": "stale"})
    assert other.renew(lambda _: 3) == []
    assert [job.step for job in slow.running()] == [3]
    assert other.complete(id, {"own": True})
    done = slow.get(id)
    assert done is not None
    assert (done.state, done.metadata, done.token) == (JobState.COMPLETED, {"own": True}, 2)
    assert done.clip_in(Path("data")) == Path(f"data/clips/{id}-2.mp4")


def test_a_renewed_claim_is_not_lost(opened: Open) -> None:
    holder, other = opened(lease_seconds=_LEASE), opened(lease_seconds=_LEASE)
    add(holder)
    taken(holder)
    end = time.monotonic() + 4 * _LEASE
    while time.monotonic() < end:
        assert holder.renew(lambda _: 0) == []
        if holder.rows("SELECT lease_until > clock() FROM jobs") == [(True,)]:
            assert other.recover() == []


def test_a_server_that_was_away_does_not_judge_others(opened: Open) -> None:
    """After an outage all leases have ended, and those who hold them renew them first."""
    holder, other = opened(lease_seconds=_LEASE), opened(lease_seconds=30.0)
    add(holder)
    taken(holder)
    wait_until(
        lambda: holder.rows("SELECT lease_until < clock() FROM jobs") == [(True,)],
        30,
        lambda: "no lease ends",
    )
    assert other.recover() == []
    assert holder.renew(lambda _: 0) == []


def test_what_a_server_hands_back_is_taken_at_once(opened: Open) -> None:
    leaving, other = opened(), opened()
    ids = [add(leaving, created_at=float(age)) for age in range(3)]
    leaving.register({"ranks": 2})
    assert [taken(leaving).id for _ in range(2)] == ids[:2]
    assert [(row["ranks"], row["claims"]) for row in other.servers()] == [(2, 2)]
    leaving.release()
    assert other.servers() == []
    assert take_all(other) == ids


def test_a_server_takes_only_what_it_can_make(opened: Open) -> None:
    """By its weights, and by its ranks, for which some numbers of steps are too few."""
    svd, wan = opened(), opened()
    svd.kind, wan.kind = "weights of svd", "wan"
    first = add(svd, model="svd", weights="weights of svd")
    other = add(svd, model="svd", weights="newer weights")
    text = add(svd, model="wan")
    assert [id for id, _ in wan.waiting()] == [text]
    wan.why_not = lambda job: "too few steps" if job.id == text else None
    assert wan.take_next() is None
    second = add(wan, model="wan")
    assert taken(wan).id == second
    assert take_all(svd) == [first]
    wan.why_not = lambda _: None
    assert wan.renew(lambda _: 0) == []  # and looks again at what it has passed over
    assert taken(wan).id == text
    assert [job.id for job in svd.page(owner=None, limit=9, states=[JobState.QUEUED])] == [other]


def test_servers_say_what_is_new(opened: Open) -> None:
    speaker, listener = opened(), opened()
    assert listener.listen(0.0) == (False, [])
    id = add(speaker)
    assert listener.listen(30.0) == (True, [])
    taken(listener)
    speaker.ask_to_cancel(id)
    assert listener.listen(30.0) == (False, [id])


def test_a_queue_goes_on_once_its_database_is_back(opened: Open, postgres: Postgres) -> None:
    queue = opened()
    id = add(queue)
    postgres.stop()
    try:
        for change in (queue.take_next, lambda: queue.get(id), lambda: queue.listen(0.1)):
            with pytest.raises(OutputError, match=r"postgresql://.* does not answer"):
                change()
    finally:
        postgres.start()

    def is_back() -> bool:
        with contextlib.suppress(OutputError):
            return queue.get(id) is not None
        return False

    wait_until(is_back, 60, lambda: "the queue stays away")
    assert taken(queue).id == id
    assert queue.complete(id, {})


def test_an_answer_that_is_lost_loses_no_clip(opened: Open) -> None:
    """The transaction has completed the job, and the connection ends before the answer."""
    queue = opened()
    id = add(queue)
    taken(queue)
    change = queue.change

    @contextlib.contextmanager
    def lost(alone: str = "") -> Iterator[object]:
        with change(alone) as database:
            yield database
        raise OutputError("the connection has ended")

    queue.change = lost  # type: ignore[method-assign, assignment]
    with pytest.raises(OutputError):
        queue.complete(id, {"a": 1})
    queue.change = change  # type: ignore[method-assign]
    assert queue.complete(id, {"a": 1})


def test_what_does_not_belong_together_is_refused(
    opened: Open, database: str, postgres: Postgres, tmp_path: Path
) -> None:
    opened()
    with pytest.raises(RequestError, match="is not that of the queue"):
        JobQueue(tmp_path / "another", url=database)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "theirs").touch()
    name = database.rpartition("/")[2]
    postgres.execute("UPDATE queue SET version = 99", name)
    with pytest.raises(RequestError, match="version 99"):
        opened()
    postgres.execute("DROP TABLE queue", name)
    with pytest.raises(RequestError, match="another program"):
        opened()
    postgres.execute("DROP TABLE jobs, owners, servers", name)
    with pytest.raises(RequestError, match="other files, such as 'theirs'"):
        JobQueue(tmp_path / "files", url=database)
    JobQueue(tmp_path / "files", url=database, adopts=True).close()


@pytest.mark.parametrize("wrong", [{"queue": "mysql://db/svdpp"}, {"lease": 0.0}])
def test_options_of_no_use_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"--{next(iter(wrong))}"):
        ServeOptions(**wrong)


def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"127\.0\.0\.1:1/svdpp' does not answer") as refused:
        JobQueue(tmp_path, url="postgresql://user:secret@127.0.0.1:1/svdpp")
    assert "secret" not in refused.value.message
