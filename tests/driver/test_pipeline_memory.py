"""A pipeline that runs for days keeps nothing of clips that are finished and returned."""

from __future__ import annotations

import gc
import os
from collections import deque
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from svdpp.config import ClipRequest, OutputConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import NotFiniteError
from tests.driver.dummies import HANG_SECONDS, clips, config, pids
from tests.faults.damage import Damage

HISTORY = 10


def _held() -> int:
    """How many elements all collections of this process hold together."""
    gc.collect()
    collections = (list, dict, set, deque)
    return sum(len(each) for each in gc.get_objects() if type(each) in collections)


@pytest.mark.long
@pytest.mark.processes
def test_two_thousand_clips_leave_no_growing_collection_behind(tmp_path: Path) -> None:
    """Taken by handle, by `results` and by `run`; one in fifty is lost, and some are cancelled."""
    bounded = config(2, steps=2)
    lost = _LosesMany("nan", 1, 0)
    with Pipeline(bounded, history_clips=HISTORY, fault=lost) as pipeline:
        _make(pipeline, 100, tmp_path)
        resident = _resident(pipeline)
        _make(pipeline, 1000, tmp_path)  # the longest history holds 1000 clips
        held, objects = _held(), len(gc.get_objects())
        _make(pipeline, 900, tmp_path)
        assert _held() < held + 900
        assert len(gc.get_objects()) < objects + 900
        assert pipeline._clips.num_added == 2000
        growth = [now / then for then, now in zip(resident, _resident(pipeline), strict=True)]
        assert max(growth) < 1.02, growth
        assert len(pipeline.failures) == HISTORY
        assert pipeline.trace.summary().clips <= HISTORY
        assert len({step.clip for step in pipeline.trace.steps}) <= HISTORY
        assert pipeline.trace.costs().step_seconds > 0


class _LosesMany(Damage):
    """The fault, at every fiftieth clip."""

    def strikes(self, kind: str, rank: int, clip: int) -> bool:
        return (kind, rank) == (self.kind, self.rank) and clip % 50 == 0


def _make(pipeline: Pipeline, count: int, folder: Path) -> None:
    for first in range(0, count, 100):
        requests = [
            ClipRequest(seed=seed, output=OutputConfig(path=str(folder / f"{seed}.mp4")))
            for seed in range(first, first + 98)
        ]
        for request in requests[:48]:
            pipeline.submit(request).exception(HANG_SECONDS)
        quick = replace(pipeline.config.sampling, num_inference_steps=4)
        handles = pipeline.submit([replace(request, sampling=quick) for request in requests[48:]])
        for handle in handles[1::5]:
            handle.cancel()
        for _ in pipeline.results():
            pass
        for seed in range(2):
            pipeline.run(ClipRequest(seed=seed))


def _resident(pipeline: Pipeline) -> list[int]:
    """Resident bytes of the parent and of each rank."""
    return [psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *pids(pipeline))]


@pytest.mark.processes
def test_a_whole_run_is_kept_unless_asked_otherwise() -> None:
    with Pipeline(config(2, steps=2), fault=_LosesMany("nan", 1, 0)) as pipeline:
        for first in (0, 60):
            with pytest.raises(NotFiniteError):
                pipeline.run(clips(*range(first, first + 60)))
        assert [failure.clip for failure in pipeline.failures] == [0, 50, 100]
        assert pipeline.trace.summary().clips == 120
