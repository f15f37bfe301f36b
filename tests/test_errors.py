"""Every error has its exit code, and crosses a process boundary as the same type."""

from __future__ import annotations

import json
import signal

import pytest

from svdpp import errors

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
    if isinstance(each, type) and issubclass(each, errors.SvdppError)
}


def test_every_type_has_its_exit_code_and_its_meaning_in_the_help() -> None:
    from svdpp.cli.command import EPILOG

    assert {name: errors.exit_code_of(each("no")) for name, each in TYPES.items()} == EXIT_CODES
    for each in TYPES.values():
        assert f"{each.exit_code} {each.meaning};" in " ".join(EPILOG.split())


def test_signals_end_as_in_a_shell() -> None:
    error = errors.Interrupted(signal.SIGTERM)
    assert (errors.exit_code_of(error), str(error)) == (128 + 15, "ended by SIGTERM")


@pytest.mark.parametrize("cls", TYPES.values())
def test_an_error_crosses_to_another_process(cls: type[errors.SvdppError]) -> None:
    message = "rank 3: 'é\n你' {x}"
    record = json.loads(json.dumps(errors.error_to_dict(cls(message, "try --é"))))
    error = errors.error_from_dict(record)
    assert type(error) is cls
    assert (error.message, error.hint, str(error)) == (message, "try --é", message)


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), MemoryError(), OSError(28, "x")])
def test_what_was_not_foreseen_is_unexpected_and_crosses_with_its_name(error: Exception) -> None:
    """Builtins are none of ours, even those that ours derive from: they would hide bugs."""
    assert errors.exit_code_of(error) == 1
    crossed = errors.error_from_dict(errors.error_to_dict(error))
    assert type(crossed) is errors.SvdppError
    assert crossed.message == f"{type(error).__name__}: {error}"


def test_library_users_may_catch_builtins() -> None:
    assert issubclass(errors.RequestError, ValueError)
    assert issubclass(errors.OutOfMemoryError, MemoryError)
    assert issubclass(errors.ClosedError, RuntimeError)


@pytest.mark.parametrize(
    "error", [errors.RankError("no", "h", picture="rank 0 |"), OSError(28, "full")]
)
def test_a_copy_for_another_thread_says_the_same(error: Exception) -> None:
    copied = errors.reraisable(error)
    assert copied is not error
    assert (type(copied), str(copied), copied.__cause__) == (type(error), str(error), error)
    assert vars(copied) == vars(error)


def test_several_errors_end_with_the_highest_code() -> None:
    first = errors.InputError("a photograph")
    several = [errors.RequestError("r"), first, errors.InputError("another")]
    assert errors.worst_of(several, "2 lost").message == f"2 lost: {first}"
    assert errors.worst_of([*several, errors.NotFiniteError("n")], "3 lost").exit_code == 9
