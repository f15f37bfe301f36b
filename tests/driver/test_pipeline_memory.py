"""A pipeline that makes thousands of clips, one after another, does not grow."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace

import psutil
import pytest

from svdpp.config import ClipRequest
from svdpp.driver.clip_handle import ClipHandle
from svdpp.driver.pipeline import Pipeline
from tests.driver.dummies import HANG_SECONDS, config, pids

_FIRST, _LAST = 100, 2000


@pytest.mark.long
@pytest.mark.processes
def test_memory_does_not_grow_with_the_number_of_clips() -> None:
    """Some clips are cancelled, some have parameters of their own; few are unfinished at a time."""
    settings = config(2, split="dithered")
    other = replace(settings.sampling, num_inference_steps=3)
    unfinished: deque[ClipHandle] = deque()
    before: list[int] = []
    with Pipeline(settings, history_clips=20) as pipeline:
        for seed in range(_LAST):
            sampling = other if seed % 3 else None
            unfinished.append(pipeline.submit(ClipRequest(seed=seed, sampling=sampling)))
            if seed % 10 == 0:
                unfinished.pop().cancel()
            if len(unfinished) > 4:
                unfinished.popleft().result(HANG_SECONDS)
            if seed == _FIRST:
                before = _resident(pipeline)
        after = _resident(pipeline)
    growth = [late / early for early, late in zip(before, after, strict=True)]
    assert max(growth) < 1.02, growth


def _resident(pipeline: Pipeline) -> list[int]:
    """Resident bytes of the parent and of each rank."""
    return [psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *pids(pipeline))]
