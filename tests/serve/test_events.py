"""Followers look again in time, and neither slow nor vanished ones cost anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from svdpp.serve import events
from svdpp.serve.events import Followers


async def _looks(followers: Followers, job_id: str, number: int) -> float:
    """Seconds until so many looks."""
    begun = time.monotonic()
    with followers.follow(job_id) as news:
        for _ in range(number):
            await news()
    return time.monotonic() - begun


def test_news_of_a_job_come_at_once_and_from_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_LOOK_SECONDS", 60.0)

    async def follow() -> None:
        followers, looks = Followers(), Counter[str]()

        async def look(name: str) -> None:
            with followers.follow(name) as news:
                for _ in range(2):
                    await news()
                    looks[name] += 1

        async def until(happens: Callable[[], bool]) -> None:
            async with asyncio.timeout(30):
                while not happens():
                    await asyncio.sleep(0.001)

        mine, other = (asyncio.create_task(look(name)) for name in "ab")
        await until(lambda: followers.number == 2)
        for count in (1, 2):
            threading.Thread(target=followers.wake, args=("a",)).start()
            await until(lambda: looks["a"] == count)  # noqa: B023  it is awaited here
        await mine
        assert (looks["b"], other.done()) == (0, False)
        threading.Thread(target=followers.close).start()
        await until(lambda: looks["b"] == 1)
        followers.wake("b")
        await asyncio.wait_for(other, 30)
        assert followers.is_closed
        assert not followers._flags

    asyncio.run(follow())


def test_without_news_they_look_from_time_to_time_and_less_often_if_they_are_many() -> None:
    async def follow(number: int) -> float:
        followers = Followers()
        return max(await asyncio.gather(*(_looks(followers, "a", 1) for _ in range(number))))

    assert asyncio.run(follow(1)) >= 0.25
    assert asyncio.run(follow(200)) >= 1.0


def test_a_vanished_client_leaves_nothing() -> None:
    async def follow() -> None:
        followers = Followers()
        tasks = [asyncio.create_task(_looks(followers, "a", 1000)) for _ in range(50)]
        await asyncio.sleep(0)
        assert followers.number == 50
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (followers.number, dict(followers._flags)) == (0, {})

    asyncio.run(follow())


def test_a_follower_of_a_dead_loop_harms_nobody() -> None:
    followers = Followers()
    followers.wake("a")
    asyncio.run(_looks(followers, "a", 1))
    followers.wake("a")
    followers.close()
