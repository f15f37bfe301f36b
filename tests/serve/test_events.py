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
