"""Threads that go on whatever happens, and say so once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from loguru import logger

from svdpp.errors import ClosedError, OutputError
from svdpp.serve import database
from svdpp.serve.database import AwayError, Background
from tests.driver.dummies import HANG_SECONDS
from tests.faults.processes import wait_until

NO_LINKS, FULL, AWAY = PermissionError("no links here"), OutputError("full"), AwayError("away")


@pytest.mark.parametrize(
    ("turns", "logged"),
    [
        ([NO_LINKS, NO_LINKS, FULL], ["it fails: no links here"]),
        ([AWAY, AWAY, FULL], ["it fails: full"]),
        ([FULL, None, FULL], ["it fails: full"] * 2),
    ],
)
def test_a_failure_is_logged_once_until_there_is_none(
    monkeypatch: pytest.MonkeyPatch, turns: list[Exception | None], logged: list[str]
) -> None:
    monkeypatch.setattr(database, "_RETRY_SECONDS", 0.0)
    left: Iterator[Exception | None] = iter([*turns, ClosedError("closed")])
    lines: list[str] = []

    def turn() -> None:
        if (error := next(left)) is not None:
            raise error

    sink = logger.add(lambda line: lines.append(line.partition("\n")[0]), format="{message}")
    thread = Background("test", turn, 0.0, failure="it fails")
    thread.start()
    thread._thread.join(HANG_SECONDS)
    logger.remove(sink)
    assert lines == logged
    assert next(left, "none") == "none"


def test_the_last_turn_is_another_one() -> None:
    turns: list[str] = []
    thread = Background(
        "test", lambda: turns.append("a"), 1000.0, failure="", last=lambda: turns.append("b")
    )
    thread.close()  # it was not started
    assert turns == []
    thread = Background(
        "test", lambda: turns.append("a"), 1000.0, failure="", last=lambda: turns.append("b")
    )
    thread.start()
    wait_until(lambda: turns, HANG_SECONDS, "no turn")
    thread.close()
    assert turns == ["a", "b"]


def test_a_close_between_two_turns_is_noticed() -> None:
    turns: list[str] = []
    thread = Background(
        "test", lambda: turns.append("a"), 1000.0, failure="", last=lambda: turns.append("b")
    )

    class Woken(threading.Event):
        def clear(self) -> None:
            thread.is_closing = True  # as `close` does it in another thread
            self.set()
            super().clear()

    thread._is_woken = Woken()
    thread.start()
    thread._thread.join(10)
    assert turns == ["b"]
