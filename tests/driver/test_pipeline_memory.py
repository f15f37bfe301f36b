"""A pipeline that runs for days keeps nothing of clips that are finished and returned."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from svdpp.config import ClipRequest, OutputConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import NotFiniteError
from tests.driver.dummies import HANG_SECONDS, clips, config, pids
from tests.faults.damage import Damage

HISTORY = 10


def _sizes(root: object) -> dict[str, int]:
    """The size of each collection that `root` references, by the path of attributes."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    left: deque[tuple[str, object]] = deque([("pipeline", root)])
    while left:
        path, value = left.popleft()
        if id(value) in seen or isinstance(value, str | bytes | int | float):
            continue
        seen.add(id(value))
        if isinstance(value, list | dict | set | frozenset | tuple | deque):
            sizes[path] = len(value)
        left += [(f"{path}{name}", part) for name, part in _parts(value)]
    return sizes


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, list | set | frozenset | tuple | deque):
        for part in value:
            yield "[]", part
    elif type(value).__module__.partition(".")[0] in ("svdpp", "threading", "queue"):
        for name, part in getattr(value, "__dict__", {}).items():
            yield f".{name}", part


def test_collections_are_found_wherever_they_are() -> None:
    pipeline = Pipeline(config())
    pipeline._clips._failures.extend([None] * 7)  # type: ignore[list-item]
    pipeline._clips.hidden = {"deep": ({1, 2, 3},)}  # type: ignore[attr-defined]
    sizes = _sizes(pipeline)
    assert sizes["pipeline._clips._failures"] == 7
    assert sizes["pipeline._clips.hidden['deep'][]"] == 3


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
        before = _sizes(pipeline)
        objects = len(gc.get_objects())
        _make(pipeline, 900, tmp_path)
        after = _sizes(pipeline)
        assert len(gc.get_objects()) < objects + 900
        assert pipeline._clips.num_added == 2000
        grown = {path: size for path, size in after.items() if size > before.get(path, 0) + HISTORY}
        assert not grown
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
