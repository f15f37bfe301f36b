"""Batches in the tables of the queue: lines become jobs, and the jobs determine the status."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.errors import OutputError, RequestError
from svdpp.serve.batch_table import Batch, BatchFile, BatchState, BatchTable
from svdpp.serve.job import Job, JobState
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.retention import remove_job
from svdpp.serve.schemas import batch_view
from svdpp.serve.uploads import UploadStore
from tests.support.engines import add, in_state, job_of, new_job, remove_leftovers_now, taken


@pytest.fixture
def table(each_store: JobQueue) -> BatchTable:
    return BatchTable(each_store)


def new_batch(id: str = "batch_1", total: int = 2, **values: Any) -> Batch:
    about = {"model_key": "m", "created_at": 1000.0, "input_file": "file_1", "input_sha256": "0"}
    return Batch(id=id, total=total, **{**about, **values})


def line_jobs(batch: Batch, number: int) -> list[Job]:
    """Return new jobs for the next `number` lines of a batch, without storing them."""
    return [
        new_job(
            owner=batch.owner,
            batch_id=batch.id,
            custom_id=f"line {index}",
            batch_line=index,
            created_at=batch.created_at,
        )
        for index in range(batch.stored, batch.stored + number)
    ]


def store_batch(table: BatchTable, **values: Any) -> tuple[Batch, list[Job]]:
    """Store a batch, and jobs for all its lines; return both."""
    batch = table.add(new_batch(**values), max_open=1000, max_open_of_owner=None)
    jobs = line_jobs(batch, batch.total)
    assert table.add_lines(batch, jobs)
    return batch, jobs


def status(table: BatchTable, id: str = "batch_1") -> str:
    batch = table.get(id)
    assert batch is not None
    return batch_view(batch, table.counts([id])[id], "demo").status


def test_a_batch_from_request_to_its_last_clip(table: BatchTable, each_store: JobQueue) -> None:
    queue = each_store
    batch = new_batch(total=3, metadata={"a": "Füße"}, owner="ann", idempotency_key="k")
    assert table.add(batch, max_open=3, max_open_of_owner=3) == batch
    assert table.get(batch.id) == batch
    assert table.validating("m") == [batch]
    assert table.validating("of others") == []
    assert status(table) == "validating"
    jobs = line_jobs(batch, 2)
    assert table.add_lines(batch, jobs)
    assert not table.add_lines(batch, line_jobs(batch, 2)), "the same lines, by another server"
    batch = replace(batch, stored=2)
    assert table.validating("m") == [batch]
    assert status(table) == "validating"
    with pytest.raises(OutputError, match="took too long to store"):
        table.add_lines(batch, line_jobs(batch, 1), until=0.0)
    jobs += line_jobs(batch, 1)
    assert table.add_lines(batch, jobs[2:])
    assert table.validating("m") == []
    assert (status(table), table.num_open_lines()) == ("in_progress", 3)

    for state, job in zip((JobState.COMPLETED, JobState.FAILED), jobs, strict=False):
        claimed = taken(queue)
        assert (claimed.id, claimed.custom_id) == (job.id, job.custom_id)
        if state is JobState.COMPLETED:
            queue.complete(job.id, {}, claimed.fencing_token)
        else:
            queue.fail(job.id, RequestError("no"), claimed.fencing_token)
    assert status(table) == "in_progress"
    assert queue.cancel_waiting(jobs[2].id)
    found = table.get(batch.id)
    assert found is not None
    view = batch_view(found, table.counts([batch.id])[batch.id], "demo")
    assert view.status == "completed"
    assert view.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert view.completed_at == int(job_of(queue, jobs[2].id).finished_at or 0)
    assert (view.output_file_id, view.error_file_id) == ("file_1_output", "file_1_error")
    ended = [job.id for job in table.jobs(batch.id, JobState, page=2)]
    assert ended == [job.id for job in jobs]
    listed = queue.page(owner="ann", limit=2, order="asc", batch_id=batch.id, after=jobs[0].id)
    assert [job.id for job in listed] == [job.id for job in jobs[1:]]


def test_a_long_batch_delays_another_key_by_one_clip(
    table: BatchTable, each_store: JobQueue
) -> None:
    _, jobs = store_batch(table, total=50, owner="alice")
    assert taken(each_store).id == jobs[0].id
    bobs = add(each_store, owner="bob", created_at=2000.0)
    assert taken(each_store).id == bobs
    assert taken(each_store).id == jobs[1].id


def test_lines_fill_the_queue_for_nobody(table: BatchTable, each_store: JobQueue) -> None:
    store_batch(table, total=5, owner="alice")
    assert each_store.num_open() == 0
    each_store.add(new_job(owner="bob"), max_open=1)
    assert each_store.num_open() == 1
    with pytest.raises(QueueFullError) as full:
        each_store.add(new_job(owner="bob"), max_open=1)
    assert full.value.details == {"open": 1, "limit": 1}
    # The lines count towards the limit of the key that sent the batch.
    with pytest.raises(QueueFullError) as full:
        each_store.add(new_job(owner="alice"), max_open=9, max_open_of_owner=5)
    assert full.value.details == {"open": 5, "limit": 5, "owner": "alice"}


def test_a_batch_beyond_a_limit_is_refused_whole(table: BatchTable) -> None:
    store_batch(table, total=2, owner="alice")
    table.add(new_batch("batch_2", 2, owner="alice"), max_open=4, max_open_of_owner=None)
    third = new_batch("batch_3", 1, owner="alice")
    with pytest.raises(QueueFullError) as full:
        table.add(third, max_open=4, max_open_of_owner=None)
    assert full.value.details == {"open": 4, "limit": 4, "lines": 1}
    with pytest.raises(QueueFullError) as full:
        table.add(third, max_open=5, max_open_of_owner=4)
    assert full.value.details == {"open": 4, "limit": 4, "lines": 1, "owner": "alice"}
    table.add(replace(third, owner="bob"), max_open=5, max_open_of_owner=1)
    assert table.num_open_lines() == 5


def test_an_idempotency_key_stands_for_one_batch(table: BatchTable) -> None:
    first = new_batch(idempotency_key="k", owner="ann")
    table.add(first, 9, None)
    again = new_batch("batch_2", idempotency_key="k", owner="ann", input_file="file_2")
    assert table.add(again, max_open=0, max_open_of_owner=0) == first
    for change in ({"input_sha256": "1"}, {"metadata": {"a": "b"}}):
        with pytest.raises(RequestError, match="was used for a batch with another"):
            table.add(replace(again, **change), 9, None)
    other = replace(again, owner="bob")
    assert table.add(other, 9, None) == other


def test_a_cancelled_batch_stores_no_further_line(table: BatchTable, each_store: JobQueue) -> None:
    queue = each_store
    batch = table.add(new_batch(total=4), 9, None)
    jobs = line_jobs(batch, 3)
    assert table.add_lines(batch, jobs)
    running = taken(queue)
    assert table.request_cancel(batch.id)
    assert not table.request_cancel(batch.id)
    assert not table.add_lines(replace(batch, stored=3), line_jobs(replace(batch, stored=3), 1))
    assert table.half_cancelled() == [batch.id]
    assert sorted(table.cancel_waiting(batch.id)) == sorted(job.id for job in jobs[1:])
    assert table.cancel_waiting(batch.id) == table.half_cancelled() == []
    assert (table.running(batch.id), status(table)) == ([running.id], "cancelling")
    queue.mark_cancelled(running.id, running.fencing_token)
    assert (status(table), table.num_open_lines()) == ("cancelled", 0)


def test_what_has_ended_is_not_cancelled(table: BatchTable, each_store: JobQueue) -> None:
    batch, (job,) = store_batch(table, total=1)
    each_store.complete(job.id, {}, taken(each_store).fencing_token)
    assert not table.request_cancel(batch.id)
    faulty = table.add(new_batch("batch_2"), 9, None)
    fault = {"line": 1, "code": "c", "message": "m", "param": "steps"}
    assert table.fail(faulty.id, [fault])
    assert not table.fail(faulty.id, [])
    assert not table.request_cancel(faulty.id)
    assert table.half_cancelled() == []
    assert (status(table), status(table, "batch_2")) == ("completed", "failed")


def test_the_jobs_of_a_failed_batch_are_left_to_be_cancelled(table: BatchTable) -> None:
    batch = table.add(new_batch(), 9, None)
    (job,) = jobs = line_jobs(batch, 1)
    assert table.add_lines(batch, jobs)
    assert table.fail(batch.id, [{"line": 2, "code": "c", "message": "m"}])
    assert table.half_cancelled() == [batch.id]
    assert table.cancel_waiting(batch.id) == [job.id]
    found = table.get(batch.id)
    assert found is not None
    view = batch_view(found, table.counts([batch.id])[batch.id], "demo")
    assert (view.status, view.output_file_id) == ("failed", None)
    assert view.error_file_id == "file_1_error"


def test_a_batch_goes_with_its_last_clip(table: BatchTable, each_store: JobQueue) -> None:
    _, jobs = store_batch(table, total=2)
    refused, cancelled = (table.add(new_batch(id), 9, None).id for id in ("batch_2", "batch_3"))
    table.fail(refused, [{"line": 1}])
    table.request_cancel(cancelled)
    for job in jobs:
        assert table.remove_ended(1.0) == []
        each_store.complete(job.id, {}, taken(each_store).fencing_token)
        remove_job(each_store, job.id)
    assert table.remove_ended(1.0) == ["batch_1"]
    late = each_store.now() + 1
    assert sorted(table.remove_ended(late)) == [refused, cancelled]


def test_batches_are_listed_the_newest_first(table: BatchTable) -> None:
    for index in range(5):
        id, owner = f"batch_{index}", "bob" if index == 2 else "ann"
        table.add(new_batch(id, owner=owner, created_at=1000.0 + index // 4), 99, None)
    first = table.page("ann", 2, None)
    assert [batch.id for batch in first] == ["batch_4", "batch_3"]
    assert [batch.id for batch in table.page("ann", 9, first[-1].id)] == ["batch_1", "batch_0"]


def test_files_of_lines_are_kept_as_long_as_they_are_needed(
    table: BatchTable, each_store: JobQueue, tmp_path: Path
) -> None:
    uploads = UploadStore(tmp_path / "data/photos")
    ids = [f"file_{digit * 32}" for digit in "abc"]
    for id in ids:
        sha256, size = uploads.save_lines(io.BytesIO(b"{}\n"), id)
        file = BatchFile(id=id, name="a", bytes=size, sha256=sha256, created_at=1000.0)
        if id != ids[2]:
            table.add_file(file, max_bytes=6)
    with pytest.raises(QueueFullError) as full:
        table.add_file(file, max_bytes=8)
    assert full.value.details == {"open": 6, "limit": 8, "owner": ""}
    remove_leftovers_now(each_store)
    left = {path.stem for path in (tmp_path / "data/photos").iterdir()}
    assert left == table.file_ids() == set(ids[:2])
    table.add(new_batch(input_file=ids[0]), 9, None)
    assert [file.id for file in table.files_before(2000.0)] == [ids[1]]
    assert table.files_before(1000.0) == []
    table.request_cancel("batch_1")
    assert len(table.files_before(2000.0)) == 2


def test_clips_without_a_batch_are_in_none(table: BatchTable, each_store: JobQueue) -> None:
    id = in_state(each_store, JobState.COMPLETED)
    batch, _ = store_batch(table)
    assert job_of(each_store, id).batch_id is None
    assert id not in {job.id for job in table.jobs(batch.id, JobState)}
    assert table.get("batch_9") is None
    assert BatchState.VALIDATING not in {batch.state for batch in table.page("", 9, None)}
