"""How errors of other layers are answered."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")

from svdpp.errors import (
    ClosedError,
    InputError,
    OutOfMemoryError,
    OutputError,
    RankError,
    RequestError,
    SvdppError,
)
from svdpp.serve.photos import DecoderBusyError
from svdpp.serve.views import ApiError, as_api_error, error_answer, error_body


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("x"), 422, "invalid_request"),
        (InputError("x"), 422, "invalid_image"),
        (OutOfMemoryError("x"), 422, "too_large_for_memory"),
        (OutputError("x"), 503, "storage_failed"),
        (ClosedError("x"), 503, "closing"),
        (DecoderBusyError("x"), 503, "decoder_busy"),
        (RankError("x"), 500, "internal_error"),
        (ApiError(404, "video_not_found", "x"), 404, "video_not_found"),
    ],
    ids=repr,
)
def test_status_and_code(error: SvdppError, status: int, code: str) -> None:
    found = as_api_error(error)

    assert (found.status, found.code) == (status, code)
    assert ("Retry-After" in found.headers) == (status == 503)


def test_a_failed_disk_is_named_only_in_the_log() -> None:
    error = as_api_error(OutputError("the queue '/srv/data/queue.sqlite3' cannot be used"))
    assert error.message == "the server cannot store its data"


def test_an_error_names_no_folder_of_the_server() -> None:
    record = {
        "type": "InputError",
        "message": "cannot read '/srv/my data/photos/video_1.png': it changed",
        "hint": "see /srv/my-data/log",
        "details": {"path": "/srv/my data/photos/video_1.png", "steps": [3, "~/data/clips/a.mp4"]},
    }
    body = error_body(record)
    assert body.message == "cannot read 'video_1.png': it changed"
    assert body.hint == "see log"
    assert body.details == {"path": "video_1.png", "steps": [3, "a.mp4"]}
    api_error = as_api_error(RankError(record["message"]))
    assert api_error.message == body.message


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (
            ("--motion-bucket-id must be 0 to 9", "use --steps 4 or --frames 2"),
            ("motion_bucket_id must be 0 to 9", "use steps 4 or frames 2"),
        ),
        (("--param flow_shift is too large", ""), ("flow_shift is too large", "")),
        # What only whoever starts the server can do.
        (("7 steps cannot be divided", "use --split balanced"), ("7 steps cannot be divided", "")),
        (("too many pixels", "--max-megapixels 50"), ("too many pixels", "--max-megapixels 50")),
    ],
    ids=str,
)
def test_messages_name_fields_of_requests_and_no_options(
    raised: tuple[str, str], shown: tuple[str, str]
) -> None:
    error = as_api_error(RequestError(*raised))
    assert (error.message, error.hint) == shown


def test_an_answer_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-hub")
    error = RankError("'/home/alice/data' is full", details={"why": "a-secret-of-the-hub"})
    body = json.loads(bytes(error_answer(as_api_error(error)).body))

    assert body["error"]["message"] == "'data' is full"
    assert body["error"]["details"] == {"why": "***"}
    assert body["error"]["type"] == "server_error"
