"""The log: its content and files, and a run that continues without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from svdpp.cli.log import open_log


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    logger.remove()


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
        "warning: the log '/dev/full' is no longer written: No space left on device"
    ]
    assert len(said) == 4
    assert capfd.readouterr().err == ""


def test_remarks_are_shown_unless_the_command_is_quiet() -> None:
    said: list[str] = []
    for quiet in (False, True):
        open_log(verbosity=0, log_file=None, write=said.append, quiet=quiet)
        logger.info("for the log")
        logger.bind(is_remark=True).info("downloading 3.4 GB")
    assert said == ["downloading 3.4 GB"]
