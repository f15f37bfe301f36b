"""Reports and traces are written, or refused at the start if they cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from svdpp.cli.options.files import TraceOptions
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RankError
from tests.cli.shell import DEMO, PHOTO, TINY, svdpp_here
from tests.driver.dummies import clips, config
from tests.faults.damage import Damage
from tests.trace_format import check_trace

SMALL = ("--world", "2", "--steps", "2", "--latent-shape", "1", "4", "2", "8", "8", "--clips", "2")
RUN = ("run", PHOTO, *DEMO, *TINY)


@pytest.mark.processes
def test_simulate_writes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = svdpp_here("simulate", *SMALL, "-q", "--trace", "new/trace.json")

    assert (answer.code, answer.err) == (0, "")
    trace = json.loads((tmp_path / "new/trace.json").read_text())
    check_trace(trace)
    assert trace[0]["args"]["world_size"] == 2
    steps = [event for event in trace if event.get("cat") == "step"]
    assert len(steps) == 2 * 2
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


@pytest.mark.processes
def test_a_run_that_fails_leaves_what_was_measured_until_then(tmp_path: Path) -> None:
    pipeline = Pipeline(config(steps=2), fault=Damage("raise", 1, 1))
    trace_outputs = TraceOptions(trace=tmp_path / "trace.json")
    with pytest.raises(RankError, match="an injected fault"), trace_outputs.of(pipeline), pipeline:
        pipeline.run(clips(0, 1))

    events = json.loads((tmp_path / "trace.json").read_text())
    check_trace(events, is_whole=False)
    done = {(e["pid"], e["args"]["clip"]) for e in events if e.get("cat") == "step"}
    assert (1, 0) in done
    assert (1, 1) not in done


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline(config(1))
    trace_outputs = TraceOptions(trace=tmp_path / "trace.json")
    with pytest.raises(ZeroDivisionError), trace_outputs.of(pipeline):
        raise ZeroDivisionError

    assert list(tmp_path.iterdir()) == []
