"""HTTP routes of a real server with real ranks."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image

from svdpp.driver.clips import ClipHandle
from tests.support.engines import job_of
from tests.support.http_server import PHOTO, HttpServer, ServerHere, error_of, wait

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def long_clip(server: HttpServer) -> Iterator[str]:
    """Keep the server busy with a clip of about ten seconds; yield the clip's id.

    Delete the clip after the block.
    """
    (id,) = server.add(steps=1000)
    server.wait_for(id, "in_progress")
    try:
        yield id
    finally:
        server.client.delete(f"/v1/videos/{id}")


def test_a_request_is_stored_and_made(server: HttpServer) -> None:
    answer = server.request(seed=5, fps=8, motion_bucket_id=60, priority=3, name="../a/sea.jpg")

    assert answer.status_code == 202
    video = answer.json()
    assert answer.headers["location"] == f"/v1/videos/{video['id']}"
    assert re.fullmatch(r"video_[0-9a-f]{32}", video["id"])
    assert video["status"] in ("queued", "in_progress")
    assert (video["object"], video["model"], video["seed"]) == ("video", "dummy", 5)
    assert (video["fps"], video["motion_bucket_id"], video["priority"]) == (8, 60, 3)
    assert video["input"]["name"] == "sea.jpg"
    (remark,) = video["remarks"]
    assert re.match(r"'sea.jpg' \(\d+x\d+\) is stretched to \d+x\d+, as by diffusers; fit", remark)
    assert server.request(fit="pad").json()["remarks"] == []
    assert video["seconds"] == f"{video['frames'] / 8:.2f}"
    other, defaults = server.request().json(), server.client.get("/v1/models").json()["data"][0]
    assert defaults["defaults"].items() <= other.items()
    assert other["seed"] != server.request().json()["seed"]

    done = server.wait_for(video["id"], "completed")
    about = [done[name] for name in ("progress", "step", "place", "eta_seconds")]
    assert about == [100, done["steps"], None, None]
    assert video["created_at"] <= done["started_at"] <= done["completed_at"]
    metadata = server.client.get(f"/v1/videos/{video['id']}/metadata")
    assert re.fullmatch(r"[0-9a-f]{64}", metadata.json()["latents_sha256"])
    assert isinstance(server, ServerHere)
    stored = job_of(server.service.queue, video["id"])
    assert stored.input_pixels == math.prod(Image.open(io.BytesIO(PHOTO)).size)
    # The dummy model writes no mp4 file.
    error_of(server.client.get(f"/v1/videos/{video['id']}/content"), 404, "no_content")


@pytest.mark.parametrize(
    ("form", "code", "field", "words"),
    [
        ({"stepps": 4}, "invalid_request", "stepps", "stepps is unknown"),
        ({"steps": 0}, "invalid_request", "steps", "steps must be 1 or more"),
        ({"steps": 4, "num_inference_steps": 4}, "invalid_request", "num_inference_steps", ""),
        ({"width": 1024}, "invalid_request", "size", "got '1024x'"),
        ({"width": 64, "size": "64x64"}, "invalid_request", "width", "width is unknown"),
        ({"fit": "tile"}, "invalid_request", "fit", "fit must be"),
        ({"size": "64x64"}, "wrong_size", "size", "1024x576"),
        ({"frames": 4, "seconds": 2}, "frames_and_seconds", "seconds", "contradict"),
        ({"seconds": "nan"}, "invalid_request", "seconds", "seconds"),
        ({"prompt": "a sea"}, "no_prompt", "prompt", "takes no prompt"),
        ({"model": "sora-2"}, "model_not_found", "model", "'dummy'"),
        (
            {"min_guidance_scale": 3, "max_guidance_scale": 1},
            *("invalid_request", "min_guidance_scale", "guidance"),
        ),
        ({"photo": b"GIF89a, not really"}, "invalid_image", "input_reference", "'sea.jpg'"),
        ({"photo": b""}, "invalid_image", "input_reference", "empty"),
        ({"key": "x" * 300}, "invalid_idempotency_key", "", "255"),
        *(
            ({"json": {"input_reference": image}}, "invalid_request", "input_reference", words)
            for image, words in (
                ("http://localhost/a.png", "URLs are not fetched"),
                ({"file_id": "file-1"}, ""),
                ("data:image/png,abc", "must be in base64"),
                ("a photograph", "base64"),
            )
        ),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_at_once(
    server: HttpServer, form: dict[str, Any], code: str, field: str, words: str
) -> None:
    before = server.client.get("/v1/videos?limit=1").json()
    status = {"model_not_found": 404, "invalid_idempotency_key": 400}.get(code, 422)
    is_json = "json" in form
    answer = server.client.post("/v1/videos", **form) if is_json else server.request(**form)
    error = error_of(answer, status, code)

    assert words in error["message"]
    assert "--" not in error["message"]  # names no command-line option
    if field:
        faults = error["details"].get("faults", [error["details"]])
        assert [fault["field"] for fault in faults] == [field]
    assert server.client.get("/v1/videos?limit=1").json()["first_id"] == before["first_id"]
    assert not list((server.folder / "photos").glob(".upload*"))


def test_a_body_that_is_no_form(server: HttpServer) -> None:
    post = server.client.post
    error_of(post("/v1/videos", data={"steps": 4}), 415, "unsupported_media_type")
    error_of(post("/v1/videos"), 415, "unsupported_media_type")
    form = {"content-type": "multipart/form-data; boundary=x"}
    error = error_of(post("/v1/videos", content=b"--y", headers=form), 400, "invalid_form")
    assert error["message"].startswith("the body must be a JSON object, or a form as multipart")
    error = error_of(post("/v1/videos", files={"other": PHOTO}), 422, "invalid_request")
    assert {each["field"] for each in error["details"]["faults"]} == {"input_reference", "other"}


def test_head_has_the_headers_of_get_and_no_body(server: HttpServer) -> None:
    """HEAD and GET have the same headers on every route, except event streams and archives."""
    paths = server.client.get("/openapi.json").json()["paths"]
    streams = ("/events", "/archive")
    gets = [path for path in paths if "get" in paths[path] and not path.endswith(streams)]
    with long_clip(server) as id:
        for path in (*gets, "/", "/openapi.json", "/page/main.js"):
            path = path.replace("{id}", id)
            head = server.client.head(path)
            with server.client.stream("GET", path) as get:
                assert (path, head.status_code, head.content) == (path, get.status_code, b"")
                assert head.headers.get("content-type") == get.headers.get("content-type")
    assert server.client.head("/v1/videos/x/verify").status_code == 405
    metrics = server.client.get("/metrics").text
    assert 'method="HEAD",route="/v1/videos/{id}",status="200"' in metrics


def test_a_body_that_is_too_large(server: HttpServer) -> None:
    form = {"content-type": "multipart/form-data; boundary=x"}
    head = f"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**21}\r\n"
    answer = server.raw(f"{head}Content-Type: {form['content-type']}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["error"]["details"] == {"limit_bytes": 2**20}

    def endless() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="input_reference"; filename="a"\r\n\r\n'
        while True:
            yield bytes(2**16)

    # This request does not announce the length of its body.
    with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        late = server.client.post("/v1/videos", content=endless(), headers=form)
        error_of(late, 413, "content_too_large")
    assert server.client.get("/v1/models").status_code == 200


def test_a_repeated_request_makes_one_clip(server: HttpServer) -> None:
    first, again = (server.request(key="once", steps=4).json() for _ in range(2))
    error = error_of(server.request(key="once", steps=5), 422, "invalid_request")

    assert (again["id"], again["seed"]) == (first["id"], first["seed"])
    assert "key" in error["message"]
    server.wait_for(first["id"], "completed")
    assert len(list((server.folder / "photos").glob(f"{first['id']}.*"))) == 1
    assert len(list((server.folder / "photos").iterdir())) == len(server.all_ids())


def test_waiting_clips_know_their_place(server: HttpServer) -> None:
    with long_clip(server) as running:
        ids = server.add(4)
        # All clips are read in one response, because their estimates change with time.
        waiting, begun = (
            server.client.get(f"/v1/videos?{query}").json()["data"]
            for query in ("status=queued&order=asc", "status=in_progress")
        )
        assert [video["id"] for video in waiting] == ids
        assert [video["id"] for video in begun] == [running]
        assert [server.video(id)["place"] for id in ids] == [0, 1, 2, 3]
        rest = server.client.get(f"/v1/videos?status=queued&after={ids[2]}").json()["data"]
        assert [video["id"] for video in rest] == [ids[1], ids[0]]
        assert server.video(running)["place"] is None
        # A clip that a rank has received, but has not begun, counts as queued.
        assert [video["status"] for video in waiting] == ["queued"] * 4
        assert [video["place"] for video in waiting] == [0, 1, 2, 3]
        etas = [video["eta_seconds"] for video in waiting]
        assert etas == sorted(etas)
        for id in ids:
            answer = server.client.post(f"/v1/videos/{id}/cancel").json()
            assert answer["cancel_requested"] == (answer["status"] == "queued")
            assert server.wait_for(id, "cancelled")["place"] is None


def is_released(server: HttpServer, id: str) -> bool:
    """Return whether no rank of a server works on the clip any longer."""
    ranks = server.client.get("/v1/engine").json()["ranks"]
    # a removed clip is shown as `other`
    return all(rank["video"] not in (id, "other") for rank in ranks)


def test_a_running_clip_has_no_content_and_stays_when_it_is_cancelled(server: HttpServer) -> None:
    """A running clip has no content. A cancelled clip stays listed, and a second cancel has no
    effect.
    """
    with long_clip(server) as id:
        for what in ("content", "metadata"):
            error = error_of(server.client.get(f"/v1/videos/{id}/{what}"), 409, "not_completed")
            assert error["details"] == {"status": "in_progress"}
        error_of(server.client.post(f"/v1/videos/{id}/verify"), 409, "not_completed")
        first = server.client.post(f"/v1/videos/{id}/cancel")
        assert first.status_code == 202
        assert (first.json()["status"], first.json()["cancel_requested"]) == ("in_progress", True)
        ended = server.wait_for(id, "cancelled")
        assert not ended["cancel_requested"]
        wait(lambda: is_released(server, id))
        again = server.client.post(f"/v1/videos/{id}/cancel")
        assert (again.status_code, again.json()) == (200, ended)
    (done,) = server.add()
    made = server.wait_for(done, "completed")
    assert server.client.post(f"/v1/videos/{done}/cancel").json() == made
    assert server.client.get(f"/v1/videos/{done}/metadata").status_code == 200


def wait_for_removal(server: HttpServer, id: str) -> None:
    assert isinstance(server, ServerHere)
    wait(lambda: is_released(server, id))
    wait(lambda: not [path for path in server.folder.rglob("*") if id in path.name])
    wait(lambda: server.service.queue.get(id) is None)


def test_a_deleted_clip_is_gone_and_a_repeated_delete_says_so(server: HttpServer) -> None:
    for steps, status, ended in ((1000, "in_progress", "cancelled"), (1, "completed", "completed")):
        (id,) = server.add(steps=steps)
        server.wait_for(id, status)
        answer = server.client.delete(f"/v1/videos/{id}")
        assert answer.status_code == (202 if ended == "cancelled" else 200)
        answer = answer.json()

        assert id not in server.all_ids()
        assert answer == {"id": id, "object": "video.deleted", "deleted": True, "status": ended}
        for method, path in (("GET", ""), ("GET", "/input"), ("DELETE", "")):
            answer = server.client.request(method, f"/v1/videos/{id}{path}")
            error_of(answer, 404, "video_not_found")
        wait_for_removal(server, id)


def test_clients_that_cancel_keep_no_other_waiting(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 clients that wait until a clip is cancelled block no other client.

    This holds even if the clip never stops.
    """
    monkeypatch.setattr(ClipHandle, "cancel", lambda _: False)
    assert isinstance(server, ServerHere)
    with long_clip(server) as id:
        paths = [("POST", f"/v1/videos/{id}/cancel")] * 60
        with ThreadPoolExecutor(64) as threads:
            answers = [threads.submit(server.client.request, *each, timeout=20) for each in paths]
            assert server.request(steps=1).status_code == 202
            assert {answer.result().status_code for answer in answers} == {202}
        monkeypatch.undo()
        server.service.engine.dispatcher.request_cancel(id)
        server.wait_for(id, "cancelled")


def test_an_image_comes_back_as_it_was_sent_while_it_is_there(server: HttpServer) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "teal").save(file, "GIF")
    (id,) = server.add(photo=file.getvalue(), name="../sea.html", steps=1)
    path = f"/v1/videos/{id}/input"
    answer = server.client.get(path)

    assert (answer.status_code, answer.content) == (200, file.getvalue())
    assert answer.headers["content-type"] == "image/gif"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"].startswith("private")
    assert "html" not in answer.headers["content-disposition"]
    server.wait_for(id, "completed")
    (server.folder / "photos" / f"{id}.gif").unlink()
    error_of(server.client.get(path), 404, "no_input")


# --- events -------------------------------------------------------------------------------------


def test_events_follow_a_clip_to_its_end(server: HttpServer) -> None:
    """A client that reconnects gets the events after the last one that it received.

    After the clip's last event, the client gets status 204, which makes a browser stop
    reconnecting.
    """
    (id,) = server.add(steps=100)
    with server.events(id) as events:
        first = list(itertools.islice(events, 2))
    with server.events(id, **{"Last-Event-ID": first[-1]["event_id"]}) as events:
        found = [*first, *events]

    assert {event["id"] for event in found} == {id}
    assert found[-1]["status"] == "completed"
    ids = [event["event_id"] for event in found]
    steps = [event["step"] for event in found]
    assert steps == sorted(steps)
    assert len(set(steps)) > 3
    seen = {"Last-Event-ID": ids[-1]}
    assert server.client.get(f"/v1/videos/{id}/events", headers=seen).status_code == 204
    with server.events(id, **{"Last-Event-ID": "of an earlier one"}) as events:
        assert [event["event_id"] for event in events] == [ids[-1]]


def test_the_events_of_a_deleted_clip_end_by_saying_so(server: HttpServer) -> None:
    with long_clip(server) as id, server.events(id) as events:
        assert next(events)["object"] == "video"
        assert server.client.delete(f"/v1/videos/{id}").status_code == 202
        *_, last = events
    assert last.pop("event_id") == f"{id}-deleted"
    deleted = {"id": id, "object": "video.deleted", "deleted": True, "status": "cancelled"}
    assert last == deleted
    error_of(server.client.get(f"/v1/videos/{id}/events"), 404, "video_not_found")


def test_what_no_route_has_is_refused(server: HttpServer) -> None:
    """An unknown `variant` is refused.

    If it were ignored, a client that misspells `thumbnail` would get the whole clip.
    """
    (id,) = server.add(steps=1)
    path = f"/v1/videos/{id}/content?variant=thumbnail"
    error = error_of(server.client.get(path), 422, "invalid_request")
    server.wait_for(id, "completed")
    assert error["message"] == "variant must be 'video', got 'thumbnail'"


def metric_sum(server: HttpServer, name: str) -> float:
    """Return the sum of all series of a metric at a server's /metrics."""
    text = server.client.get("/metrics").text
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)
    assert found, name
    return sum(map(float, found))


# --- requests in the formats of other programs, also in JSON, with the mp4 as the response ------

SYNC = "/v1/videos/sync"
#: Fields of a request, with the names that vLLM-Omni's clients use.
THEIRS = {"num_frames": 2, "num_inference_steps": 3, "width": 128, "height": 128, "seed": 5}
OURS = {"frames": 2, "steps": 3, "size": "128x128", "seed": 5}
BASE64 = b64encode(PHOTO).decode()
URL = f"data:image/jpeg;base64,{BASE64}"


@pytest.fixture(scope="module")
def clip(demo: HttpServer) -> str:
    """Hash of the latents of a clip that was requested at /v1/videos with the fields `OURS`."""
    (id,) = demo.add(**OURS)
    demo.wait_for(id, "completed")
    return latents_of(demo, id)


def latents_of(server: HttpServer, id: str) -> str:
    return str(server.client.get(f"/v1/videos/{id}/metadata").json()["latents_sha256"])


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
    demo: HttpServer, clip: str, request_of: dict[str, Any]
) -> None:
    answer = demo.client.post(SYNC, **request_of)

    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["x-model"] == "demo"
    assert float(answer.headers["x-inference-time-s"]) > 0
    id = answer.headers["x-request-id"]
    assert demo.video(id).items() >= OURS.items()
    assert latents_of(demo, id) == clip
    assert answer.content == demo.client.get(f"/v1/videos/{id}/content").content


def test_the_log_names_the_video_and_no_poll(demo: HttpServer) -> None:
    (id,) = demo.add(**OURS)
    demo.wait_for(id, "completed")
    demo.client.delete(f"/v1/videos/{id}")

    states = ("requested", "finished", "completed", "removed")
    said = sorted(line for line in demo.err.splitlines() if id in line)
    assert said == sorted(f"INFO {id} is {state}" for state in states)
    assert "clip 0" not in demo.err
    assert "/v1/" not in demo.err


def running_clip(server: HttpServer) -> str:
    """Wait until a clip is in progress at a server, and return the clip's id."""
    path = "/v1/videos?status=in_progress"
    wait(lambda: server.client.get(path).json()["data"])
    return str(server.client.get(path).json()["first_id"])


def test_a_client_that_goes_away_is_not_waited_for(server: HttpServer) -> None:
    body = json.dumps({"input_reference": BASE64, "steps": 1000}).encode()
    head = f"POST {SYNC} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with server.connected() as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait(lambda: metric_sum(server, "svdpp_event_streams") == 1)
        id = running_clip(server)
    wait(lambda: metric_sum(server, "svdpp_event_streams") == 0)
    assert server.video(id)["status"] in ("in_progress", "completed")
    server.client.delete(f"/v1/videos/{id}")


def test_a_clip_that_is_cancelled_ends_the_wait(server: HttpServer) -> None:
    body = {"input_reference": BASE64, "steps": 1000}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(server.client.post, SYNC, json=body)
        server.client.post(f"/v1/videos/{running_clip(server)}/cancel")
    error = error_of(answer.result(), 409, "not_completed")
    assert error["message"] == "the video is cancelled, not completed"


# --- about the server ---------------------------------------------------------------------------


def test_the_server_describes_itself(server: HttpServer) -> None:
    models = server.client.get("/v1/models").json()
    engine = server.client.get("/v1/engine").json()
    layout = {
        "split": "alternating",
        "replicas": 1,
        "decoders": 1,
        "cfg_parallel": 1,
        "decode_ranks": 1,
    }
    assert engine["layout"].items() >= layout.items()
    document = server.client.get("/openapi.json").json()

    (model,) = models["data"]
    assert server.client.get("/v1/models/dummy").json() == model
    error_of(server.client.get("/v1/models/a/b"), 404, "model_not_found")
    assert (model["id"], model["sizes"]) == ("dummy", ["1024x576"])
    assert (model["owned_by"], model["object"]) == ("svdpp", "model")
    assert 0 <= time.time() - model["created"] < 3600
    assert model["limits"]["max_upload_bytes"] == 2**20
    assert model["limits"]["max_megapixels"] == 24
    for path in ("/health", "/ready"):
        said = {"status": "ok", "state": "ready", "reason": None, "ranks": 2, "restarts": 0}
        assert server.client.get(path).json() == said
    assert [rank["rank"] for rank in engine["ranks"]] == [0, 1]
    assert set(engine["queue"]) == {"queued", "in_progress", "completed", "failed", "cancelled"}
    assert "HTTPValidationError" not in document["components"]["schemas"]
    responses = document["paths"]["/v1/videos/{id}/input"]["get"]["responses"]
    assert responses["200"]["content"].keys() == {"image/*", "video/*"}
    # FastAPI's page /docs is off, because it would load scripts from another host.
    assert server.client.get("/docs").status_code == 404


def test_metrics_follow_clips(server: HttpServer) -> None:
    before = metric_sum(server, "svdpp_eta_error_ratio_count")
    for _ in range(2):  # only the second clip has an ETA when it is requested
        server.wait_for(server.add(steps=20)[0], "completed")
    wait(lambda: metric_sum(server, "svdpp_eta_error_ratio_count") > before)
    assert metric_sum(server, "svdpp_jobs") == len(server.all_ids())


def test_every_answer_has_the_headers_of_security(server: HttpServer) -> None:
    for path in ("/", "/page/main.js", "/page/page.css", "/v1/models", "/nothing"):
        headers = server.client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers


def test_a_full_queue_says_when_to_come_again(demo: HttpServer) -> None:
    ids = demo.add(2, steps=1000)
    answer = demo.request()
    error = error_of(answer, 429, "queue_full")

    assert error["details"] == {"open": 2, "limit": 2}
    assert 1 <= int(answer.headers["retry-after"]) <= 600
    ready = demo.client.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "the queue is full")
    for id in ids:
        demo.client.delete(f"/v1/videos/{id}")
    wait(lambda: demo.client.get("/ready").status_code == 200)


def test_the_time_of_each_request_is_measured_by_route_and_status(server: HttpServer) -> None:
    error_of(server.client.get("/v1/videos/video_0"), 404, "video_not_found")
    text = server.client.get("/metrics").text
    (count,) = re.findall(
        r'^svdpp_http_request_seconds_count\{route="/v1/videos/\{id\}",status="404"\} (\S+)$',
        text,
        re.M,
    )
    requests = re.findall(
        r'^svdpp_http_requests_total\{.*route="/v1/videos/\{id\}",status="404"\} (\S+)$', text, re.M
    )
    assert float(count) == sum(map(float, requests)) >= 1
