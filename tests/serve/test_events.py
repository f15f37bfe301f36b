"""Subscribers get the newest state of a job, and neither slow nor vanished ones cost anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from svdpp.serve.events import Events, JobEvent


async def _all(
    events: Events,
    job_id: str = "a",
    last_id: int | None = None,
    found: list[JobEvent] | None = None,
) -> list[JobEvent]:
    found = [] if found is None else found
    async with events.subscribe(job_id, last_id) as subscription:
        async for event in subscription:
            if event is not None:
                found.append(event)
    return found


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_subscriber_gets_the_newest_event_first_and_ends_after_a_final_one() -> None:
    async def follow() -> list[JobEvent]:
        events = Events()
        events.publish("a", {"step": 1})
        events.publish("a", {"step": 2})
        found: list[JobEvent] = []
        task = asyncio.create_task(_all(events, found=found))
        await _until(lambda: len(found) == 1)
        assert (events.num_subscribers, events.watched()) == (1, {"a"})
        events.publish("b", {"step": 9})
        threading.Thread(target=events.publish, args=("a", {"step": 3})).start()
        await _until(lambda: len(found) == 2)
        events.publish("a", {"step": 4}, is_final=True)
        await asyncio.wait_for(task, 10)
        assert (events.num_subscribers, events.watched()) == (0, set())
        return found

    found = asyncio.run(follow())
    assert [event.data["step"] for event in found] == [2, 3, 4]
    assert [event.is_final for event in found] == [False, False, True]
    assert sorted(event.id for event in found) == [event.id for event in found]


@pytest.mark.parametrize("known", ["none", "old", "newest"])
def test_a_subscription_resumes_by_the_last_id(known: str) -> None:
    async def follow() -> list[int]:
        events = Events()
        old = events.publish("a", {"step": 1})
        newest = events.publish("a", {"step": 2})
        last_id = {"none": None, "old": old.id, "newest": newest.id}[known]
        found: list[JobEvent] = []
        task = asyncio.create_task(_all(events, "a", last_id, found))
        await _until(lambda: bool(found if known != "newest" else events.watched()))
        events.publish("a", {"step": 3}, is_final=True)
        return [event.data["step"] for event in await asyncio.wait_for(task, 10)]

    assert asyncio.run(follow()) == ([3] if known == "newest" else [2, 3])


def test_an_id_from_before_a_restart_is_never_newer() -> None:
    before = Events().publish("a", {})
    time.sleep(0.002)
    assert Events().publish("a", {}).id > before.id


def test_a_slow_subscriber_skips_events_and_never_blocks_a_publisher() -> None:
    async def follow() -> list[int]:
        events, steps = Events(), []
        async with events.subscribe("a") as subscription:
            for step in range(20_000):
                events.publish("a", {"step": step})
            async for event in subscription:
                assert event is not None
                steps.append(event.data["step"])
                events.publish("a", {"step": -1}, is_final=True)
        return steps

    assert asyncio.run(follow()) == [19_999, -1]


def test_silence_yields_none() -> None:
    async def follow() -> None:
        async with Events().subscribe("a", silence=0.01) as subscription:
            assert await anext(subscription) is None

    asyncio.run(follow())


def test_a_vanished_client_leaves_nothing() -> None:
    async def follow() -> None:
        events = Events()
        events.publish("a", {})
        found: list[list[JobEvent]] = [[] for _ in range(50)]
        tasks = [asyncio.create_task(_all(events, found=own)) for own in found]
        await _until(lambda: all(found))
        assert events.num_subscribers == 50
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert events.num_subscribers == 0

    asyncio.run(follow())


def test_a_subscriber_of_a_dead_loop_harms_nobody() -> None:
    events = Events()
    contexts = [events.subscribe("a")]
    asyncio.run(contexts[0].__aenter__())  # type: ignore[arg-type]
    events.publish("a", {"step": 1})
    events.close()


def test_the_number_of_jobs_is_bounded() -> None:
    events = Events(max_jobs=10)
    for job in range(100):
        events.publish(f"job {job}", {})
    events.publish("job 95", {})
    assert events.newest("job 89") is None
    assert events.newest("job 90") is not None
    assert len(events._newest) == 10


def test_closing_and_forgetting_end_subscriptions() -> None:
    async def follow() -> None:
        events = Events()
        forgotten, closed = (asyncio.create_task(_all(events, name)) for name in "ab")
        await _until(lambda: events.num_subscribers == 2)
        events.forget("a")
        assert await asyncio.wait_for(forgotten, 10) == []
        threading.Thread(target=events.close).start()
        assert await asyncio.wait_for(closed, 10) == []
        assert await asyncio.wait_for(_all(events, "b"), 10) == []

    asyncio.run(follow())
