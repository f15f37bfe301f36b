"""The log and the trace: their content and files, and a run that continues without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from svdpp.cli.console import Console
from svdpp.cli.options.files import LogOptions, TraceOptions
from svdpp.cli.progress import open_log
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RankError
from tests.cli.shell import svdpp_here
from tests.driver.dummies import clips, config
from tests.faults.damage import Damage
from tests.trace_format import check_trace


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    logger.remove()


def test_the_files_of_a_long_life_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svdpp.cli.progress._FILE_BYTES", 10_000)
    open_log(verbosity=0, log_file=tmp_path / "log", write=lambda _: None)
    for number in range(200):
        logger.info("clip {} is finished", number)

    files = ["log", "log.1", "log.2", "log.3", "log.4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert all(path.stat().st_size <= 10_000 for path in tmp_path.iterdir())
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert json.loads(last)["record"]["message"] == "clip 199 is finished"


def test_the_file_gets_json_lines_and_steps_only_with_v(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "new" / "run.jsonl"
    for verbosity in (0, 1):  # the second run appends
        open_log(verbosity=verbosity, log_file=path, write=said.append)
        logger.bind(rank=3).debug(f"a step, verbosity {verbosity}")
        logger.bind(rank=3).info("two\nlines")
    records = [json.loads(line)["record"] for line in path.read_text().splitlines()]

    messages = ["two\nlines", "a step, verbosity 1", "two\nlines"]
    assert [record["message"] for record in records] == messages
    assert {record["extra"]["rank"] for record in records} == {3}
    assert len(said) == 1  # without -v nothing, and debug needs -vv


def test_a_full_disk_is_said_once_and_stops_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    open_log(verbosity=1, log_file=Path("/dev/full"), write=said.append)
    for _ in range(3):
        logger.info("still here")

    warnings = [line for line in said if "still here" not in line]
    assert warnings == [
        "warning: cannot write the log '/dev/full': [Errno 28] No space left on device"
    ]
    assert len(said) == 4
    assert capfd.readouterr().err == ""


def test_brackets_in_a_name_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    LogOptions(verbose=1).open(Console(), None)
    logger.info("'[/x] [b].jpg' is lost")
    assert capsys.readouterr().err.endswith(" rank - '[/x] [b].jpg' is lost\n")


SMALL = ("--world", "2", "--steps", "2", "--latent-shape", "1", "4", "2", "8", "8", "--clips", "2")


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
