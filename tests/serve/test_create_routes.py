"""Requests as other programs send them: their names of fields, JSON, and an answer with the mp4."""

from __future__ import annotations

import json
import socket
import threading
from base64 import b64encode
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.serve.http_server import HANG_SECONDS, PHOTO, HttpServer, error_of, wait

pytestmark = [pytest.mark.processes, pytest.mark.long]

SYNC = "/v1/videos/sync"
#: As vLLM-Omni's clients name them.
THEIRS = {"num_frames": 2, "num_inference_steps": 3, "width": 128, "height": 128, "seed": 5}
OURS = {"frames": 2, "steps": 3, "size": "128x128", "seed": 5}
BASE64 = b64encode(PHOTO).decode()
URL = f"data:image/jpeg;base64,{BASE64}"


@pytest.fixture(scope="module")
def clip(demo: HttpServer) -> bytes:
    """The clip of `OURS`, by the usual routes."""
    (id,) = demo.add(**OURS)
    demo.wait_for(id, "completed")
    return demo.client.get(f"/v1/videos/{id}/content").content


def parts(**fields: Any) -> dict[str, Any]:
    return {name: (None, str(value)) for name, value in fields.items()}


@pytest.mark.parametrize(
    "request_of",
    [
        {"files": {"input_reference": ("a.jpg", PHOTO), **parts(prompt="", **THEIRS)}},
        {"files": parts(image_reference=f'{{"image_url": "{URL}"}}', **THEIRS)},
        {"files": parts(**{"input_reference[image_url]": URL}, **THEIRS)},
        {"json": {"prompt": "", "image_reference": {"image_url": URL}, **THEIRS}},
        {"json": {"input_reference": BASE64, **OURS, "steps": "3"}},
        {"json": {"input_reference": URL, "fps": None, **OURS}},
    ],
    ids=["vllm form", "litellm form", "openai form", "vllm json", "base64", "data url"],
)
def test_each_way_to_ask_for_a_clip_gives_the_same_one(
    demo: HttpServer, clip: bytes, request_of: dict[str, Any]
) -> None:
    answer = demo.client.post(SYNC, **request_of)

    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["x-model"] == "demo"
    assert float(answer.headers["x-inference-time-s"]) > 0
    video = demo.video(answer.headers["x-request-id"])
    assert {name: video[name] for name in OURS} == OURS
    assert frames_of(answer.content) == frames_of(clip)


def frames_of(clip: bytes) -> bytes:
    """The coded frames of an mp4, without the metadata, which names the file."""
    begin = clip.index(b"mdat")
    return clip[begin : begin + int.from_bytes(clip[begin - 4 : begin]) - 4]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"input_reference": "http://localhost/a.png"}, "input_reference", "no URLs are fetched"),
        ({"input_reference": {"file_id": "file-1"}}, "input_reference", ""),
        ({"input_reference": "data:image/png,abc"}, "input_reference", "must be in base64"),
        ({"input_reference": "a photograph"}, "input_reference", "base64"),
        ({"input_reference": BASE64, "num_inference_steps": 0}, "steps", "1 or more"),
        ({"image_reference": "a photograph"}, "input_reference", "base64"),
        ({"input_reference": BASE64, "seed": True}, "seed", "must be a whole number, got True"),
        ({"input_reference": BASE64, "fit": {"a": "x" * 99}}, "fit", "got {'a': 'xxx"),
    ],
    ids=str,
)
def test_wrong_json(demo: HttpServer, body: Any, field: str, words: str) -> None:
    for path in ("/v1/videos", SYNC):
        error = error_of(demo.client.post(path, json=body), 422, "invalid_request")
        assert [each["field"] for each in error["details"]["faults"]] == [field]
        assert words in error["message"]


def test_json_has_a_limit_of_its_own(demo: HttpServer) -> None:
    body = {"input_reference": "A" * 17 * 2**20}
    error = error_of(demo.client.post("/v1/videos", json=body), 413, "content_too_large")
    assert error["details"] == {"limit_bytes": 16 * 2**20}


def test_the_log_names_the_video_and_no_poll(demo: HttpServer) -> None:
    (id,) = demo.add(**OURS)
    demo.wait_for(id, "completed")
    demo.client.delete(f"/v1/videos/{id}")
    lines = (demo.folder.parent / "log").read_text().splitlines()
    said = [json.loads(line)["record"]["message"] for line in lines]

    states = ("requested", "finished", "completed", "removed")
    assert sorted(message for message in said if id in message) == sorted(
        f"{id} is {state}" for state in states
    )
    assert not [message for message in said if "clip 0" in message or "/v1/" in message]


def running(server: HttpServer) -> dict[str, Any]:
    """The clip that the ranks make, once they do."""
    path = "/v1/videos?status=in_progress"
    wait(lambda: server.client.get(path).json()["data"])
    (video,) = server.client.get(path).json()["data"]
    return dict(video)


def test_a_client_that_goes_away_is_not_waited_for(server: HttpServer) -> None:
    body = json.dumps({"input_reference": BASE64, "steps": 1000}).encode()
    head = f"POST {SYNC} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    url = httpx.URL(server.url)

    def streams(number: int) -> bool:
        return f"svdpp_event_streams {number}.0" in server.client.get("/metrics").text

    with socket.create_connection((url.host, url.port or 0), timeout=HANG_SECONDS) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait(lambda: streams(1))
        video = running(server)
    wait(lambda: streams(0))
    assert server.video(video["id"])["status"] in ("in_progress", "completed")
    server.client.delete(f"/v1/videos/{video['id']}")


def test_a_clip_that_is_cancelled_ends_the_wait(server: HttpServer) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"input_reference": BASE64, "steps": 1000}
        answers.append(server.client.post(SYNC, json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    server.client.post(f"/v1/videos/{running(server)['id']}/cancel")
    thread.join(HANG_SECONDS)

    error = error_of(answers[0], 409, "not_completed")
    assert error["message"] == "the video is cancelled, not completed"
