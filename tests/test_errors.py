"""Every error has its exit code, and crosses a process boundary as the same type."""

from __future__ import annotations

import json
import signal

import pytest

from svdpp import errors
from svdpp.errors import (
    ClosedError,
    InputError,
    Interrupted,
    ModelError,
    NotFiniteError,
    OutOfMemoryError,
    RankError,
    RequestError,
    SvdppError,
    error_from_dict,
    error_to_dict,
    exit_code_of,
    reraisable,
    worst_of,
)

EXIT_CODES = {
    "SvdppError": 1,
    "RequestError": 2,
    "VerificationError": 3,
    "OutOfMemoryError": 4,
    "ModelError": 5,
    "RankError": 6,
    "DeviceError": 6,
    "TransportError": 6,
    "BrokenLinkError": 6,
    "InputError": 7,
    "OutputError": 8,
    "ClosedError": 1,
    "NotFiniteError": 9,
}
TYPES = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, SvdppError)
}


def test_every_type_has_its_exit_code_and_its_meaning_in_the_help() -> None:
    from svdpp.cli.command import EPILOG

    assert {name: exit_code_of(each("no")) for name, each in TYPES.items()} == EXIT_CODES
    for each in TYPES.values():
        assert f"{each.exit_code} {each.meaning};" in " ".join(EPILOG.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_as_in_a_shell(number: signal.Signals) -> None:
    error = Interrupted(number)

    assert exit_code_of(error) == 128 + number
    assert str(error) == f"ended by {number.name}"


@pytest.mark.parametrize("cls", TYPES.values())
@pytest.mark.parametrize(("message", "hint"), [("no", ""), ("rank 3: 'é\n你' {x}", "try --é")])
def test_record_round_trip(cls: type[SvdppError], message: str, hint: str) -> None:
    record = json.loads(json.dumps(error_to_dict(cls(message, hint))))
    error = error_from_dict(record)

    assert type(error) is cls
    assert error.details == {}
    assert (error.message, error.hint, str(error)) == (message, hint, message)


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), MemoryError(), OSError(28, "x")])
def test_what_was_not_foreseen_is_unexpected_and_crosses_with_its_name(error: Exception) -> None:
    """Builtins are none of ours, even those that ours derive from: they would hide bugs."""
    assert exit_code_of(error) == 1
    crossed = error_from_dict(error_to_dict(error))
    assert type(crossed) is SvdppError
    assert crossed.message == f"{type(error).__name__}: {error}"


def test_a_record_of_an_unknown_type_is_still_read() -> None:
    crossed = error_from_dict({"type": "FutureError", "message": "no", "hint": "h"})

    assert (type(crossed), crossed.message, crossed.hint) == (SvdppError, "no", "h")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [(RequestError, ValueError), (OutOfMemoryError, MemoryError), (ClosedError, RuntimeError)],
)
def test_library_users_may_catch_builtins(cls: type[SvdppError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)


@pytest.mark.parametrize(
    "error", [RankError("no", "h", picture="rank 0 |"), OSError(28, "full"), AssertionError("x")]
)
def test_a_copy_for_another_thread_says_the_same(error: Exception) -> None:
    copied = reraisable(error)

    assert copied is not error
    assert (type(copied), str(copied), copied.__cause__) == (type(error), str(error), error)
    assert vars(copied) == vars(error)


def test_an_error_that_cannot_be_copied_is_raised_itself() -> None:
    class OfTwo(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first + second)

    error = OfTwo("a", "b")
    assert reraisable(error) is error


def test_several_errors_end_with_the_highest_code() -> None:
    first = InputError("a photograph")
    several = [ModelError("m"), first, InputError("another"), RequestError("r")]
    assert worst_of(several, "2 lost").message == f"2 lost: {first}"
    assert worst_of([*several, NotFiniteError("n")], "3 lost").exit_code == 9
