"""Owners take turns, no job waits for ever, and pages of many jobs are fast."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from svdpp.errors import RequestError
from svdpp.serve import queue as queue_module
from svdpp.serve.job import JobState, new_id
from svdpp.serve.queue import AGEING_SECONDS, JobQueue
from tests.serve.store_jobs import add, new_job, take_all


def test_no_job_is_taken_twice(store: JobQueue) -> None:
    ids = {add(store, owner=f"owner{number % 7}") for number in range(200)}
    with ThreadPoolExecutor(8) as threads:
        taken = [id for each in threads.map(lambda _: take_all(store), range(8)) for id in each]
    assert len(taken) == len(ids)
    assert set(taken) == ids


def test_owners_take_turns(store: JobQueue) -> None:
    many = [add(store, owner="many", created_at=float(index)) for index in range(6)]
    one = add(store, owner="one", created_at=100.0)
    two = [add(store, owner="two", created_at=101.0 + index) for index in range(2)]
    expected = [many[0], one, two[0], many[1], two[1], *many[2:]]
    assert [id for id, _ in store.waiting()] == expected
    assert take_all(store) == expected


def test_a_turn_is_spent_also_if_the_owner_leaves_the_queue(store: JobQueue) -> None:
    """An owner with one job at a time does not come before one that waits."""
    first = add(store, owner="a", created_at=1.0)
    assert take_all(store) == [first]
    waiting = add(store, owner="b", created_at=3.0)
    second = add(store, owner="a", created_at=2.0)
    assert take_all(store) == [waiting, second]


def test_higher_priorities_go_first_until_others_have_waited(store: JobQueue) -> None:
    low = add(store, created_at=0.0, priority=0)
    early = add(store, created_at=9 * AGEING_SECONDS - 1, priority=9)
    late = add(store, created_at=9 * AGEING_SECONDS + 1, priority=9)
    middle = add(store, created_at=3 * AGEING_SECONDS, priority=2)
    assert take_all(store) == [early, low, late, middle]


def test_a_priority_does_not_pass_other_owners(store: JobQueue) -> None:
    urgent = [add(store, owner="a", priority=9, created_at=5.0 + index) for index in range(3)]
    plain = add(store, owner="b", created_at=6.0)
    assert take_all(store) == [urgent[0], plain, *urgent[1:]]


def test_what_is_put_back_keeps_its_place(store: JobQueue) -> None:
    for index in range(4):
        for owner in "abc":
            add(store, owner=owner, created_at=float(index), priority=index % 2)
    order = [id for id, _ in store.waiting()]
    taken = [job.id for job in (store.take_next(), store.take_next(), store.take_next()) if job]
    taken += [job.id for job in (store.take_next(), store.take_next()) if job]
    assert taken == order[:5]
    assert [job.id for job in store.running()] == taken
    for id in random.sample(taken, len(taken)):
        store.put_back(id, counts=False)
    assert [id for id, _ in store.waiting()] == order
    assert take_all(store) == order


def test_the_order_that_is_shown_is_the_order_that_is_taken(store: JobQueue) -> None:
    for seed in range(8):
        chance = random.Random(seed)
        for _ in range(chance.randint(1, 15)):
            owner, age = chance.choice("abcd"), chance.uniform(0, 5000)
            add(store, owner=owner, created_at=age, priority=chance.randint(0, 9))
        for _ in range(chance.randint(0, 5)):
            store.take_next()
        for job in store.running():
            if chance.random() < 0.5:
                store.put_back(job.id, counts=False)
        expected = [id for id, _ in store.waiting()]
        assert take_all(store) == expected


def test_pages_go_through_all_jobs_of_an_owner(store: JobQueue) -> None:
    ids = [add(store, owner="ab"[number % 2], created_at=5.0) for number in range(10)]
    store.cancel_waiting(ids[4])

    def pages(**choice: object) -> list[str]:
        found: list[str] = []
        while page := store.page(limit=3, after=found[-1] if found else None, **choice):  # type: ignore[arg-type]
            assert len(page) <= 3
            found += [job.id for job in page]
        return found

    assert pages(owner=None) == ids[::-1]
    assert pages(owner=None, order="asc") == ids
    assert pages(owner="a") == ids[::2][::-1]
    assert pages(owner="a", state=JobState.CANCELLED) == [ids[4]]
    assert pages(owner=None, state=JobState.QUEUED, order="asc") == ids[:4] + ids[5:]
    assert pages(owner="c") == []


def test_a_page_does_not_tell_of_other_owners_jobs(store: JobQueue) -> None:
    others = add(store, owner="b")
    for after in (others, new_id()):
        with pytest.raises(RequestError, match="no job"):
            store.page(owner="a", limit=3, after=after)


@pytest.mark.long
def test_ten_thousand_jobs_are_no_burden(store: JobQueue) -> None:
    with store._file.change() as database:  # in one transaction, because each waits for the disk
        for number in range(10_000):
            job = new_job(owner=f"owner{number % 10}", created_at=float(number))
            state = JobState.COMPLETED if number % 2 else JobState.QUEUED
            queue_module.insert(database, replace(job, state=state, finished_at=0.0))
    middle = store.page(owner="owner3", limit=500)[-1].id

    def seconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    assert seconds(lambda: store.get(middle)) < 0.005
    assert seconds(lambda: store.page(owner="owner3", limit=20, after=middle)) < 0.01
    assert seconds(lambda: store.page(owner=None, limit=20, state=JobState.QUEUED)) < 0.01
    assert seconds(store.counts) < 0.02
    assert seconds(store.take_next) < 0.1
    assert seconds(store.waiting) < 1.0
    for query in (
        "SELECT * FROM jobs WHERE owner = 'a' AND seq < 9 ORDER BY seq DESC LIMIT 5",
        "SELECT * FROM jobs WHERE state = 'queued' AND seq < 9 ORDER BY seq DESC LIMIT 5",
        "SELECT * FROM jobs WHERE owner = 'a' AND state = 'queued' ORDER BY seq DESC LIMIT 5",
        "SELECT state, count(*) FROM jobs GROUP BY state",
    ):
        plan = " ".join(row[3] for row in store._file.rows(f"EXPLAIN QUERY PLAN {query}"))
        assert "INDEX" in plan, query
        assert "TEMP B-TREE" not in plan, query
