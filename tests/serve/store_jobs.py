"""Jobs for tests of the store."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from svdpp.config import SvdSampling
from svdpp.serve.job import Job, new_id
from svdpp.serve.queue import JobQueue
from svdpp.serve.store import remove_leftovers

SAMPLING = SvdSampling(num_inference_steps=4, num_frames=14)


def new_job(**values: Any) -> Job:
    id = values.pop("id", new_id())
    about = {
        "seed": 1,
        "sampling": SAMPLING,
        "photo": f"{id}.png",
        "photo_name": "cat.png",
        "photo_sha256": "0" * 64,
        "created_at": 1000.0,
        **values,
    }
    return Job(id=id, **about)


def add(store: JobQueue, **values: Any) -> str:
    """The id of a new job."""
    return store.add(new_job(**values), max_open=None).id


def job_of(store: JobQueue, id: str) -> Job:
    """The job, which is there."""
    job = store.get(id)
    assert job is not None
    return job


def taken(store: JobQueue) -> Job:
    """The next job, of which there is one."""
    job = store.take_next()
    assert job is not None
    return job


def token_of(store: JobQueue, id: str) -> int:
    """The token of a job's latest claim; 0 if there is no job."""
    job = store.get(id)
    return 0 if job is None else job.token


def take_all(store: JobQueue) -> list[str]:
    """The ids of all queued jobs, in the order in which they are taken."""
    return [job.id for job in iter(store.take_next, None)]


def remove_leftovers_now(store: JobQueue, in_use: Collection[str] = ()) -> None:
    """Removes what servers remove in an hour."""
    remove_leftovers(store, remove_leftovers(store, set(), in_use), in_use)
