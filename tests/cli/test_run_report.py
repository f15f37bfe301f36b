"""The report at the end of `svdpp run`."""

from __future__ import annotations

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from svdpp.cli.console import Console
from svdpp.config import ClipRequest
from svdpp.driver.clips import ClipHandle
from svdpp.driver.jobs import ClipPlan
from svdpp.driver.pipeline import Pipeline
from svdpp.launch import group
from svdpp.worker.device import MemoryPressure
from tests.cli.shell import DEMO, PHOTO, TINY, svdpp_here
from tests.driver.dummies import clips, config

run = import_module("svdpp.cli.run")  # the package also has a command of this name


def test_clips_of_divided_batches_are_not_called_exact() -> None:
    console, heard = Console(), io.StringIO()
    console.err = RichConsole(file=heard, width=80)
    clip = {"output": "cat_0.mp4", "format": "mp4", "exact": "unproven", "cfg_parallel": 2}
    run.print_clips(console, Path("out"), [], [clip], [])
    assert "svdpp verify --cfg-parallel 2" in heard.getvalue()
    assert "to prove one" not in heard.getvalue()


@pytest.mark.processes
def test_very_many_clips_go_to_the_ranks_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_AT_ONCE", 2)
    requests, parts = clips(*range(7)), []
    with Pipeline(config(steps=2)) as pipeline:
        submit = pipeline.submit

        def count(asked: list[ClipRequest], about: list[dict[str, Any]]) -> list[ClipHandle]:
            parts.append(len(asked))
            return submit(asked, about)

        monkeypatch.setattr(pipeline, "submit", count)
        plan = ClipPlan(requests, [{} for _ in requests])
        made = list(run.results_of(pipeline, plan))
    assert parts == [2, 2, 2, 1]
    assert [result.request.seed for result in made] == list(range(7))


@pytest.mark.processes
def test_a_gpu_that_ran_short_of_memory_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ranks are forked, so that they inherit the patched memory pressure."""
    monkeypatch.setattr(MemoryPressure, "rose", lambda self: True)  # noqa: ARG005
    monkeypatch.setattr(group, "start_method", lambda device: "fork")  # noqa: ARG005
    answer = svdpp_here("run", PHOTO, *DEMO, *TINY, "--seeds", "1,2", "--out", str(tmp_path))

    assert answer.code == 0, answer
    metadata = json.loads((tmp_path / "rocket_1.mp4.json").read_text())
    assert metadata["memory_pressure"] is True
    (warning,) = [line for line in answer.err.splitlines() if "warning" in line]
    assert "bits may differ" in warning
    assert "--decode-chunk-size" in warning
    assert "--gpus" in warning
