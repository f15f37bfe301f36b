"""Signals during the report of an error, as from a launcher that ends all ranks when one fails."""

from __future__ import annotations

import os
import signal

import pytest
import typer

from svdpp.cli import failures
from svdpp.cli.console import Console
from svdpp.errors import Interrupted, RequestError
from svdpp.launch import process_lifetime

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_an_error_is_reported_changes_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def signalled(error: BaseException, signals: list[int]) -> bool:  # noqa: ARG001
        os.kill(os.getpid(), number)
        assert signals == [number]
        return False

    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(failures, "_is_reported_elsewhere", signalled)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(typer.Exit) as caught, failures.report_errors(Console(), debug=False):
        raise RequestError("10 steps do not divide")
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "error: 10 steps do not divide\n"
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_signal_between_the_error_and_its_report_is_dropped() -> None:
    """A signal that arrives while the handlers for an error's report are set is dropped."""

    def interrupt(number: int, frame: object) -> None:  # noqa: ARG001
        raise Interrupted(number)

    before = process_lifetime.handle_signals(interrupt)
    try:
        raised, set_handler = [], signal.signal

        def interrupted_once(number: int, handler: object) -> object:
            if not raised:
                raised.append(number)
                os.kill(os.getpid(), signal.SIGTERM)
            return set_handler(number, handler)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signal, "signal", interrupted_once)
            during = process_lifetime.handle_signals(signal.SIG_IGN)
        assert raised
        assert set(during.values()) == {interrupt}
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
