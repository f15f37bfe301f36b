"""Queues of several servers on one PostgreSQL: leases, fencing tokens, and who claims which job."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from svdpp.config import Lora, ParallelConfig, sampling_from
from svdpp.errors import OutputError, RequestError
from svdpp.serve.clock import uptime
from svdpp.serve.fleet import Fleet
from svdpp.serve.job import Job, JobState, new_id
from svdpp.serve.queue import JobQueue
from svdpp.serve.queue_sql import MAX_EXPIRED_LEASES
from svdpp.serve.request_schema import Capabilities
from svdpp.serve.sqlite import BackendUnavailableError
from svdpp.serve.store import FileStore
from svdpp.serve.verifier import Verifier
from tests.support.backends import Postgres
from tests.support.engines import (
    SAMPLING,
    add,
    job_of,
    new_job,
    remove_leftovers_now,
    take_all,
    taken,
)
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

Open = Callable[..., JobQueue]
_LEASE = 0.3
_ENDED = "SELECT count(*) FROM jobs WHERE lease_until < clock()"
_SHORT = replace(SAMPLING, num_inference_steps=2)


@pytest.fixture
def opened(tmp_path: Path, database: str) -> Iterator[Open]:
    """Function that opens one more `JobQueue` on the same database, as another server would."""
    with contextlib.ExitStack() as queues:

        def another(**settings: float) -> JobQueue:
            queue = JobQueue(tmp_path / "data", url=database, **{"lease_seconds": 30.0, **settings})
            return queues.enter_context(contextlib.closing(queue))

        yield another


@contextlib.contextmanager
def lost_responses(queue: JobQueue) -> Iterator[None]:
    """Let a queue's transactions in the block succeed in the database, but fail in the client."""
    transaction = queue.backend.transaction

    @contextlib.contextmanager
    def lost(advisory_lock: str = "") -> Iterator[object]:
        with transaction(advisory_lock) as connection:
            yield connection
        raise OutputError("the connection has ended")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue.backend, "transaction", lost)
        yield


def wait_requeued(queue: JobQueue) -> list[Job]:
    """Wait until another server's leases expire; requeue their jobs, and return them."""
    found: list[Job] = []
    wait_until(lambda: found.extend(queue.requeue_expired()) or found, 30, "no lease ends")
    return found


def fleet_of(queue: JobQueue) -> Fleet:
    """Return the `Fleet` object of a server with idle ranks, which are stand-ins."""
    dispatcher = Mock(num_free_slots=1, clips=list)
    engine = Mock(
        dispatcher=dispatcher, state="ready", config=Mock(world_size=2, parallel=ParallelConfig())
    )
    queue.model_key = "demo"
    return Fleet(queue, engine, Capabilities(model="demo", sampling=SAMPLING, sizes=()))


def test_a_lost_claim_ends_nothing(opened: Open) -> None:
    """A server whose lease expired cannot end the job, which another server has claimed."""
    slow, other = opened(lease_seconds=_LEASE), opened(lease_seconds=_LEASE)
    id = add(slow)
    assert taken(slow).fencing_token == 1
    assert [(job.id, job.state, job.fencing_token) for job in wait_requeued(other)] == [
        (id, JobState.QUEUED, 1)
    ]

    def ends_nothing() -> None:
        assert not slow.mark_cancelled(id, 1)
        assert not slow.complete(id, {"stale": True}, 1)
        assert not slow.fail(id, RequestError("stale"), 1)

    ends_nothing()
    now = taken(other)
    assert (now.id, now.fencing_token, now.server) == (id, 2, other.server)
    ends_nothing()
    assert other.renew(lambda _: 3) == ([], [])
    assert not slow.requeue(id, 1, counts=True)
    assert [job.step for job in slow.running()] == [3]
    assert other.complete(id, {"own": True}, 2)
    done = job_of(slow, id)
    assert (done.state, done.metadata, done.fencing_token) == (JobState.COMPLETED, {"own": True}, 2)
    assert done.clip_path(Path("data")) == Path(f"data/clips/{id}-2.mp4")


def test_a_clip_that_ends_its_servers_fails(opened: Open) -> None:
    """A job fails after several servers died while they made it.

    Claims that a server returned before its end do not count.
    """
    dying, other = opened(lease_seconds=_LEASE), opened(lease_seconds=_LEASE)
    id = add(other)
    for _ in range(MAX_EXPIRED_LEASES):
        taken(other)
        other.release()
    for _ in range(MAX_EXPIRED_LEASES - 1):
        taken(dying)
        assert [job.state for job in wait_requeued(other)] == [JobState.QUEUED]
    assert taken(dying).id == id
    (failed,) = wait_requeued(other)
    assert failed.state is JobState.FAILED
    assert failed.error is not None
    assert f"{MAX_EXPIRED_LEASES} servers died" in failed.error["message"]
    assert take_all(other) == []


def test_a_server_renews_all_its_claims(opened: Open) -> None:
    """A server renews all its claims and stores their finished steps in one call.

    The call returns the lost claims, and the jobs that are to be cancelled.
    """
    maker, other = opened(lease_seconds=_LEASE), opened()
    ids = [add(maker, created_at=float(age)) for age in range(4)]
    assert take_all(maker) == ids
    # Another fencing token means that another server has claimed the job.
    with other.backend.transaction() as connection:
        connection.execute("UPDATE jobs SET token = 2 WHERE id = ?", (ids[1],))
    other.request_cancel(ids[2])
    maker.lease_seconds = 3000.0
    assert maker.renew(ids.index) == ([(ids[1], 1)], [ids[2]])
    steps = {job.id: job.step for job in other.running()}
    assert steps == {ids[0]: 0, ids[1]: 0, ids[2]: 2, ids[3]: 3}
    assert maker.renew(ids.index) == ([], [ids[2]])
    assert [job.id for job in wait_requeued(other)] == [ids[1]]


def test_a_completion_whose_answer_is_lost_is_one(opened: Open) -> None:
    queue = opened()
    id = add(queue)
    token = taken(queue).fencing_token
    with lost_responses(queue), pytest.raises(OutputError):
        queue.complete(id, {}, token)
    assert queue.renew(lambda _: 0) == ([], [])
    assert not queue.complete(id, {"again": True}, token)
    done = job_of(queue, id)
    assert (done.state, done.metadata) == (JobState.COMPLETED, {})


def test_a_server_that_was_away_does_not_judge_others(opened: Open) -> None:
    """After an outage, a server does not requeue other servers' jobs at once.

    All leases have expired during the outage, so their holders get time to renew them.
    """
    holder, other = opened(lease_seconds=_LEASE), opened(lease_seconds=2.0)
    add(holder)
    taken(holder)
    wait_until(lambda: holder.backend.fetch_all(_ENDED) == [(1,)], 30, "no lease ends")
    fleet = fleet_of(other)
    fleet._requeue_expired_at = 0.0  # the next search for expired leases is due
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BackendUnavailableError):
        patch.setattr(other.backend, "fetch_all", Mock(side_effect=BackendUnavailableError("away")))
        fleet._run_once()
    fleet._run_once()
    assert len(holder.running()) == 1

    def is_recovered() -> bool:
        fleet._renew_claims()
        return not holder.running()

    wait_until(is_recovered, 30, "it is never recovered")


def test_a_leaving_server_hands_back_claims_that_it_does_not_know_of(opened: Open) -> None:
    """A server that ends also returns a claim whose transaction succeeded unnoticed.

    The connection broke before the server got the response.
    """
    leaving, other = opened(), opened()
    id = add(leaving)
    with lost_responses(leaving), pytest.raises(OutputError):
        leaving.claim()
    assert leaving.renew(lambda _: 0) == ([], [])
    leaving.release()
    assert take_all(other) == [id]


def test_only_latents_that_nothing_needs_any_more_are_removed(opened: Open, tmp_path: Path) -> None:
    queue, latents = opened(), tmp_path / "data" / "latents"
    latents.mkdir()
    new, old = (latents / f"{digit * 64}_step3.safetensors" for digit in "ab")
    for path, days in ((new, 6), (old, 8)):
        path.touch()
        os.utime(path, times=(time.time() - 86400 * days,) * 2)
    remove_leftovers_now(queue)
    assert list(latents.iterdir()) == [new]


def test_a_server_stores_no_late_job_and_begins_nothing_while_its_folder_is_away(
    opened: Open, tmp_path: Path
) -> None:
    """A job that is stored too late is refused, and no job begins without the data folder.

    If a server is suspended during a request, other servers may remove the request's image.
    """
    queue = opened()
    with pytest.raises(OutputError, match="took too long to store"):
        queue.add(new_job(), max_open=None, until=uptime() - 1)
    assert not queue.has_unfinished()
    assert not queue.unavailable_reason
    (tmp_path / "data").rename(tmp_path / "away")
    (tmp_path / "data").mkdir()  # an empty folder, as without a mounted disk
    assert queue.unavailable_reason == "the folder of the videos is not there"


def test_a_server_takes_and_verifies_only_what_it_can_make(opened: Open) -> None:
    """A server claims and verifies only jobs for its weights, with steps that its ranks can do."""
    svd, wan = opened(), opened()
    svd.model_key, wan.model_key = "weights of svd", "wan"
    first = add(svd, model="svd", weights="weights of svd")
    other = add(svd, model="svd", weights="newer weights")
    short = add(svd, model="wan", sampling=_SHORT)
    assert [id for id, _ in wan.waiting()] == [short]
    wan.incompatible_reason = lambda job: "too few steps" if job.sampling == _SHORT else None
    assert wan.claim() is None
    second = add(wan, model="wan")
    for queue, id in ((wan, second), (svd, first)):
        assert queue.complete(id, {"file_sha256": "0"}, taken(queue).fencing_token)
        assert queue.claim() is None
        assert queue.unverified() == [id]
        queue.set_verification(id, "running")
    assert [[*queue.pending_verifications()] for queue in (svd, wan)] == [[first], [second]]
    queued = svd.page(owner="", limit=9, states=[JobState.QUEUED], order="asc")
    assert [job.id for job in queued] == [other, short]


def test_a_server_takes_only_jobs_whose_loras_it_has(opened: Open) -> None:
    """A server claims only jobs whose LoRAs it has, identified by the hashes of their files.

    An older svdpp, which knows no LoRAs, cannot read these jobs and skips them.
    """
    has_lora, plain = opened(), opened()
    lora = Lora(name="style", weight=0.5, sha256="1" * 64)
    plain.incompatible_reason = lambda job: "it lacks a LoRA" if job.loras else None
    first, second = add(plain, loras=(lora,)), add(plain)
    assert job_of(has_lora, first).loras == (lora,)
    assert taken(plain).id == second
    assert plain.claim() is None
    assert [id for id, _ in has_lora.waiting()] == [first]
    assert taken(has_lora).loras == (lora,)
    with has_lora.backend.transaction() as connection:
        query = "SELECT sampling FROM jobs WHERE id = ?"
        ((text,),) = connection.execute(query, (first,)).fetchall()
    with pytest.raises(RequestError, match="no parameter 'loras'"):  # an older svdpp refuses LoRAs
        sampling_from(json.loads(text))
    again = replace(job_of(has_lora, first), id="video_2", idempotency_key="a", loras=())
    has_lora.add(replace(again, id="video_1", loras=(lora,)), None)
    with pytest.raises(RequestError, match="with another lora"):
        has_lora.add(again, None)


@pytest.mark.parametrize(
    "newer", [{"family": "of tomorrow"}, {"family": "svd", "of_tomorrow": 1}], ids=str
)
def test_what_only_a_newer_svdpp_can_make_is_passed_over(
    opened: Open, newer: dict[str, Any]
) -> None:
    queue = opened()
    of_tomorrow, own = add(queue, created_at=1.0), add(queue, created_at=2.0)
    with queue.backend.transaction() as connection:
        values = json.dumps(newer), of_tomorrow
        connection.execute("UPDATE jobs SET sampling = ? WHERE id = ?", values)
    assert take_all(queue) == [own]


def test_a_new_job_wakes_few_servers_of_a_large_fleet(opened: Open) -> None:
    """A new job wakes about 16 of 640 servers that could make it."""
    own, other = opened(), opened()
    fleet = fleet_of(own)
    fleet._peers = [{**fleet.servers()[0], "id": str(number)} for number in range(640)]
    random.seed(0)
    own.backend.listen(0.0)
    for _ in range(200):
        add(other)
        fleet._listen(30.0)
    assert 1 <= fleet._engine.dispatcher.wake.call_count <= 40


def test_two_servers_do_not_verify_the_same_clip(opened: Open) -> None:
    """A clip that another server verifies, or that is already verified, is not verified."""
    own, other = opened(), opened()
    verifier = Verifier(own, lambda: True)
    id = add(own, model="demo")
    own.complete(id, {"file_sha256": "0"}, taken(own).fencing_token)
    assert verifier.request(id)
    with other.backend.lock(id) as is_held:
        assert is_held
        assert not verifier._verify(id)
    assert verifier._verify(id)
    assert not verifier._verify(id)
    assert (job_of(own, id).verification_reason or "").startswith("file missing")
    with other.backend.lock(id) as is_held:
        assert is_held  # the verifier has released the lock


def test_what_does_not_belong_together_is_refused(
    opened: Open, database: str, postgres: Postgres, tmp_path: Path
) -> None:
    opened()
    with pytest.raises(RequestError, match="does not belong to the queue"):
        JobQueue(tmp_path / "another", url=database)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "theirs").touch()
    name = database.rpartition("/")[2]
    postgres.execute("DROP TABLE queue, jobs, owners, servers, batches, batch_files", name)
    with pytest.raises(RequestError, match="other files, such as 'theirs'"):
        JobQueue(tmp_path / "files", url=database)
    JobQueue(tmp_path / "files", url=database, adopts=True).close()


def test_a_store_with_objects_of_others_is_refused(tmp_path: Path, database: str) -> None:
    store = FileStore(tmp_path, f"memory://{new_id()}")
    (tmp_path / "theirs").touch()
    store.put(tmp_path / "theirs")
    queue = partial(JobQueue, tmp_path / "data", url=database, store=store)
    store.folder = tmp_path / "data"
    with pytest.raises(RequestError, match="but has objects, such as 'theirs'"):
        queue()
    queue(adopts=True).close()
    queue().close()
    (tmp_path / "data" / "queue.id").touch()
    with pytest.raises(RequestError, match=r"other files, such as 'queue\.id'"):  # of another fleet
        queue()
    with pytest.raises(RequestError, match=r"the store .* does not belong to the queue"):
        queue(store=FileStore(tmp_path / "other", f"memory://{new_id()}"))


def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"127\.0\.0\.1:1/svdpp' does not answer") as refused:
        JobQueue(tmp_path, url="postgresql://user:secret@127.0.0.1:1/svdpp")
    assert "secret" not in refused.value.message
