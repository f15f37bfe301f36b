"""Errors: exit codes, transport to other processes, and texts without secrets and home paths."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import svdpp
from svdpp import errors
from svdpp.cli.console import Console
from svdpp.config import WanSampling
from svdpp.errors import (
    RequestError,
    located_path,
    recorded_name,
    recorded_path,
    redact,
    redact_all,
    write_fields,
)
from svdpp.serve.schemas import to_api_error

EXIT_CODES = {
    "SvdppError": 1,
    "RequestError": 2,
    "VerificationError": 3,
    "OutOfMemoryError": 4,
    "ModelError": 5,
    "RankError": 6,
    "DeviceError": 6,
    "TransportError": 6,
    "MismatchError": 6,
    "BrokenLinkError": 6,
    "InputError": 7,
    "OutputError": 8,
    "ClosedError": 1,
    "NotFiniteError": 9,
    "TargetMissedError": 10,
    "ServerError": 11,
}
TYPES = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, errors.SvdppError)
}


def test_every_type_has_its_exit_code_and_its_meaning_in_the_help() -> None:
    from svdpp.cli.app import EPILOG

    assert {name: errors.exit_code_of(each("no")) for name, each in TYPES.items()} == EXIT_CODES
    for each in TYPES.values():
        assert f"{each.exit_code} {each.meaning};" in " ".join(EPILOG.split())


@pytest.mark.parametrize("cls", TYPES.values())
def test_an_error_crosses_to_another_process(cls: type[errors.SvdppError]) -> None:
    message = "rank 3: 'é\n你' {x}"
    record = json.loads(json.dumps(errors.error_to_dict(cls(message, "try --é"))))
    error = errors.error_from_dict(record)
    assert type(error) is cls
    assert (error.message, error.hint, str(error)) == (message, "try --é", message)


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), MemoryError(), OSError(28, "x")])
def test_what_was_not_foreseen_is_unexpected_and_crosses_with_its_name(error: Exception) -> None:
    """Built-in exceptions count as unexpected, and keep their names in another process.

    svdpp's errors derive from some of the built-in exceptions, so a bug could otherwise look like
    an expected error.
    """
    assert errors.exit_code_of(error) == 1
    crossed = errors.error_from_dict(errors.error_to_dict(error))
    assert type(crossed) is errors.SvdppError
    assert crossed.message == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "error", [errors.RankError("no", "h", grid="rank 0 |"), OSError(28, "full")]
)
def test_a_copy_for_another_thread_says_the_same(error: Exception) -> None:
    copied = errors.reraisable(error)
    assert copied is not error
    assert (type(copied), str(copied), copied.__cause__) == (type(error), str(error), error)
    assert vars(copied) == vars(error)


WRONG_REQUESTS = {"RequestError", "ModelError", "InputError"}


@pytest.mark.parametrize("cls", TYPES.values())
def test_every_error_is_of_a_kind_that_python_programs_know(cls: type[errors.SvdppError]) -> None:
    """Errors for wrong requests are ValueErrors, errors at run time are RuntimeErrors. No error is
    both.
    """
    kinds = {kind for kind in (ValueError, RuntimeError) if issubclass(cls, kind)}
    if cls is errors.SvdppError:
        assert kinds == set()
    else:
        assert kinds == {ValueError if cls.__name__ in WRONG_REQUESTS else RuntimeError}


DETAILS = {"rank": 3, "steps": 10, "seconds": 0.25, "path": "a/é", "none": None, "sizes": [1, 2]}


@pytest.mark.parametrize("cls", TYPES.values())
def test_details_cross_to_another_process_as_they_are(cls: type[errors.SvdppError]) -> None:
    record = json.loads(json.dumps(errors.error_to_dict(cls("no", details=DETAILS))))
    crossed = errors.error_from_dict(record)
    assert crossed.details == DETAILS
    assert type(crossed.details["seconds"]) is float
    assert type(crossed.details["rank"]) is int
    assert errors.error_from_dict(errors.error_to_dict(cls("no"))).details == {}
    assert errors.worst_of([crossed], "1 of 2 lost").details == DETAILS


def test_all_errors_are_public_names() -> None:
    assert set(TYPES) <= set(svdpp.__all__)
    assert all(getattr(svdpp, name) is each for name, each in TYPES.items())
    stub = Path(svdpp.__file__).with_suffix(".pyi").read_text()
    assert {name for name in svdpp.__all__ if f" as {name}\n" not in stub} == {"__version__"}


# --- redaction of secrets and home paths in texts -------------------------------------------------

TOKEN = "hf_" + "aB3" * 11 + "x"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/al")


@pytest.mark.parametrize(
    "password", ["pa55/w0rd", "pa55@w0rd", "pa55%w0rd", "pa55?w0rd#", "4:pa55"]
)
def test_passwords_that_are_not_percent_encoded_are_taken_out(password: str) -> None:
    for url in (f"s3://me:{password}@host/x", f"postgres://host/x?password={password}&a=b"):
        shown = redact(f"cannot open '{url}': no")
        assert not any(part in shown for part in ("pa55", "w0rd")), shown
        assert "host/x" in shown


def test_tokens_and_passwords_are_taken_out_of_texts_but_not_of_keys() -> None:
    value = {TOKEN: [f"--model {TOKEN}/x", 1, None, True, {"a": ("http://me:pass@host/x",)}]}
    shown = {TOKEN: ["--model hf_***/x", 1, None, True, {"a": ["http://***@host/x"]}]}
    assert redact_all(value) == shown
    homes = ["'/home/al/out' is full", "file:/home/al/x"]
    assert redact_all(homes) == ["'~/out' is full", "file:~/x"]
    others = [
        "/home/alice/x",
        "/mnt/home/al/x",
        "hf_internal",
        "me@host, clip c0 @14",
        "ftp://h/a@b",
        "http://127.0.0.1:8000/a@b",
    ]
    assert redact_all(others) == others


def test_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "api_key", "DB_PASSWORD", "PGPASSWD"):
        monkeypatch.setenv(name, f"correct {name}")
        assert redact(f"a correct {name}!") == "a ***!"
    monkeypatch.setenv("SHORT_TOKEN", "1")
    monkeypatch.setenv("LONGER_TOKEN", "correct HF_TOKEN battery")
    assert redact("1 correct HF_TOKEN battery") == "1 ***"


@pytest.mark.parametrize(
    ("path", "folder", "recorded"),
    [
        ("/home/al/pics/a.jpg", "/home/al/out", "../pics/a.jpg"),
        ("/home/al/pics/a.jpg", "/home/al", "pics/a.jpg"),
        ("/home/al/pics/a.jpg", "/data/out", "~/pics/a.jpg"),
        ("/data/a.jpg", "/data/out", "../a.jpg"),
        ("/data/a.jpg", "/home/al/out", "../../../data/a.jpg"),
        ("/home/alice/a.jpg", "/home/al/out", "../../alice/a.jpg"),
        ("/data/out/~/a.jpg", "/data/out", "./~/a.jpg"),
        ("/data/out/~a.jpg", "/data/out", "./~a.jpg"),
    ],
)
def test_recorded_paths_lead_back(path: str, folder: str, recorded: str) -> None:
    assert recorded_path(path, folder) == recorded
    assert os.path.normpath(located_path(recorded, folder)) == path


def test_a_record_is_read_in_another_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/Users/eve")
    assert located_path("~/pics/a.jpg", "/data/out") == Path("/Users/eve/pics/a.jpg")


def test_recorded_models() -> None:
    names = {
        "/home/al/models/svd/": "~/models/svd",
        "/data/svd": "/data/svd",
        f"{TOKEN}/x": "hf_***/x",
        "~/models/svd": "~/models/svd",
    }
    assert {name: recorded_name(name) for name in names} == names


def test_a_home_behind_a_link_is_found_under_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk7").mkdir()
    (tmp_path / "me").symlink_to(tmp_path / "disk7")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert {recorded_name(f"{tmp_path}/{name}/a") for name in ("me", "disk7")} == {"~/a"}


def test_one_error_by_the_names_of_each_front_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Each front end writes the field of an error with its own name.

    tests/serve/test_page.py tests that the web page shows an error at its input.
    """
    with pytest.raises(RequestError) as caught:
        WanSampling(num_frames=80)
    error = caught.value
    assert error.field == "num_frames"
    assert str(error) == "`num_frames` must be a multiple of 4 plus 1, got 80"

    Console(names={"num_frames": "--num-frames"}).error(error)
    assert capsys.readouterr().err == (
        "error: --num-frames must be a multiple of 4 plus 1, got 80\n"
        "hint: use --num-frames 77 or --num-frames 81\n"
    )
    Console(as_json=True).error(error)
    record = json.loads(capsys.readouterr().out)["error"]
    assert record["message"] == "--frames must be a multiple of 4 plus 1, got 80"
    assert record["field"] == "num_frames"

    answer = to_api_error(error)
    assert answer.message == "frames must be a multiple of 4 plus 1, got 80"
    assert answer.hint == "use frames 77 or frames 81"
    assert answer.details["field"] == "frames"


def test_backticks_around_other_words_stay() -> None:
    """Backticks around other words are kept, as in the name of a user's file."""
    text = "'`a b` `x`' is no file, `steps`` `num_frames`"
    assert write_fields(text, {"num_frames": "--frames"}) == (
        "'`a b` `x`' is no file, `steps`` --frames"
    )
