"""The log: its content and files, and a run that continues without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from svdpp.cli.console import Console
from svdpp.cli.log import open_log
from svdpp.cli.options.files import LogOptions


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    logger.remove()


def test_the_file_gets_steps_only_with_v(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for verbosity in (0, 1):
        open_log(verbosity=verbosity, log_file=path, write=lambda _: None)
        logger.debug(f"a step, verbosity {verbosity}")
        logger.info(f"a clip, verbosity {verbosity}")
    records = [json.loads(line)["record"]["message"] for line in path.read_text().splitlines()]
    assert records == ["a clip, verbosity 0", "a step, verbosity 1", "a clip, verbosity 1"]


def test_the_files_of_a_long_life_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svdpp.cli.log._FILE_BYTES", 10_000)
    open_log(verbosity=0, log_file=tmp_path / "log", write=lambda _: None)
    for number in range(200):
        logger.info("clip {} is finished", number)

    files = ["log", "log.1", "log.2", "log.3", "log.4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert all(path.stat().st_size <= 10_000 for path in tmp_path.iterdir())
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert json.loads(last)["record"]["message"] == "clip 199 is finished"


def test_the_file_gets_everything_as_json_lines(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "new" / "run.jsonl"
    for message in ("one", "two\nlines"):  # a second run appends
        open_log(verbosity=1, log_file=path, write=said.append)
        logger.bind(rank=3).debug(message)
    records = [json.loads(line)["record"] for line in path.read_text().splitlines()]

    assert [record["message"] for record in records] == ["one", "two\nlines"]
    assert [record["extra"]["rank"] for record in records] == [3, 3]
    assert said == []  # debug needs -vv


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
