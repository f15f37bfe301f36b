"""Followers look again in time, and vanished ones cost nothing."""

from __future__ import annotations

import asyncio
import time

from svdpp.serve.events import Followers


async def _looks(followers: Followers, number: int) -> float:
    """Seconds until so many looks."""
    begun = time.monotonic()
    with followers.follow() as pause:
        for _ in range(number):
            await pause()
    return time.monotonic() - begun


def test_they_look_from_time_to_time_and_less_often_if_they_are_many() -> None:
    async def follow(number: int) -> float:
        followers = Followers()
        return max(await asyncio.gather(*(_looks(followers, 1) for _ in range(number))))

    assert asyncio.run(follow(1)) >= 0.25
    assert asyncio.run(follow(200)) >= 1.0


def test_those_that_vanish_or_see_the_end_of_the_server_leave_nothing() -> None:
    async def follow() -> None:
        followers = Followers()
        tasks = [asyncio.create_task(_looks(followers, 1000)) for _ in range(50)]
        await asyncio.sleep(0)
        assert followers.number == 50
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        assert followers.number == 1
        followers.close()
        await asyncio.wait_for(tasks[0], 30)
        assert followers.number == 0

    asyncio.run(follow())
