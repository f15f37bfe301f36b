"""The routes, with the real server, real ranks of the dummy model and real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import math
import re
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

pytest.importorskip("fastapi")

from svdpp.serve.job import Job
from svdpp.serve.server import build
from svdpp.serve.service import Followers, ServerSettings, Service
from svdpp.serve.views import Video
from tests.media.pictures import png
from tests.serve.engines import dummy_config, dummy_job
from tests.serve.http_server import PHOTO, HttpServer, error_of, stream, wait

pytestmark = pytest.mark.processes

UNKNOWN = "video_" + "0" * 32
PIXELS = math.prod(Image.open(io.BytesIO(PHOTO)).size)


@contextlib.contextmanager
def long_clip(server: HttpServer) -> Iterator[str]:
    """A clip of about ten seconds that keeps others waiting; ended by the block's end."""
    (id,) = server.add(steps=1000)
    wait(lambda: server.video(id)["status"] == "in_progress")
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
    assert video["seconds"] == f"{video['frames'] / 8:.2f}"
    other, defaults = server.request().json(), server.client.get("/v1/models").json()["data"][0]
    assert defaults["defaults"].items() <= other.items()
    assert other["seed"] != server.request().json()["seed"]

    done = server.wait_for(video["id"], "completed")
    assert (done["progress"], done["step"], done["place"], done["eta_seconds"]) == (
        *(100, done["steps"]),
        *(None, None),
    )
    assert video["created_at"] <= done["started_at"] <= done["completed_at"]
    metadata = server.client.get(f"/v1/videos/{video['id']}/metadata")
    assert re.fullmatch(r"[0-9a-f]{64}", metadata.json()["latents_sha256"])
    with contextlib.closing(sqlite3.connect(server.folder / "queue.sqlite3")) as database:
        query = "SELECT photo_pixels FROM jobs WHERE id = ?"
        assert database.execute(query, (video["id"],)).fetchone() == (PIXELS,)
    # The dummy model makes no file.
    error_of(server.client.get(f"/v1/videos/{video['id']}/content"), 404, "no_content")


@pytest.mark.parametrize(
    ("form", "code", "field", "words"),
    [
        ({"stepps": 4}, "invalid_request", "stepps", "stepps is unknown"),
        ({"steps": 0}, "invalid_request", "steps", "steps must be 1 or more"),
        ({"motion_bucket_id": "1_0"}, "invalid_request", "motion_bucket_id", ""),
        (
            {"steps": 4, "num_inference_steps": 4},
            *("invalid_request", "num_inference_steps", "num_inference_steps is unknown"),
        ),
        ({"width": 1024}, "invalid_request", "size", "got '1024x'"),
        ({"width": 64, "size": "64x64"}, "invalid_request", "width", "width is unknown"),
        ({"width": 64, "height": 64}, "wrong_size", "size", "1024x576"),
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
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_at_once(
    server: HttpServer, form: dict[str, Any], code: str, field: str, words: str
) -> None:
    before = server.client.get("/v1/videos?limit=1").json()
    status = {"model_not_found": 404, "invalid_idempotency_key": 400}.get(code, 422)
    error = error_of(server.request(**form), status, code)

    assert words in error["message"]
    assert "--" not in error["message"]  # the names of the API, not of the command line
    if field:
        faults = error["details"].get("faults", [error["details"]])
        assert [fault["field"] for fault in faults] == [field]
    assert server.client.get("/v1/videos?limit=1").json()["first_id"] == before["first_id"]
    assert not list((server.folder / "photos").glob(".upload*"))


def test_a_photograph_of_many_pixels_is_refused_with_the_option(server: HttpServer) -> None:
    photo = png(6000, 4001, 1, 0, bytes(751 * 4001))
    error = error_of(server.request(photo=photo), 422, "invalid_image")
    assert "6000x4001 pixels, the limit is 24 million" in error["message"]
    assert "--max-megapixels" in error["hint"]


def test_a_body_that_is_no_form(server: HttpServer) -> None:
    post = server.client.post
    error_of(post("/v1/videos", data={"steps": 4}), 415, "unsupported_media_type")
    error_of(post("/v1/videos"), 415, "unsupported_media_type")
    form = {"content-type": "multipart/form-data; boundary=x"}
    error = error_of(post("/v1/videos", content=b"--y", headers=form), 400, "invalid_form")
    assert error["message"].startswith("the body must be a JSON object, or a form as multipart")
    error = error_of(post("/v1/videos", files={"other": PHOTO}), 422, "invalid_request")
    assert {each["field"] for each in error["details"]["faults"]} == {"input_reference", "other"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/videos/video_1", 404, "video_not_found"),
        ("GET", f"/v1/videos/{UNKNOWN}/events", 404, "video_not_found"),
        ("DELETE", f"/v1/videos/{UNKNOWN}", 404, "video_not_found"),
        ("GET", f"/v1/videos?after={UNKNOWN}", 404, "video_not_found"),
        ("GET", "/v1/videos?limit=0", 422, "invalid_request"),
        ("GET", "/v1/videos?status=lost", 422, "invalid_request"),
    ],
)
def test_every_error_has_one_shape(
    server: HttpServer, method: str, path: str, status: int, code: str
) -> None:
    error_of(server.client.request(method, path), status, code)


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/videos", "GET, HEAD, POST"), ("/v1/videos/x/verify", "POST"), ("/ready", "GET, HEAD")],
)
def test_a_wrong_method_is_told_all_methods(server: HttpServer, path: str, methods: str) -> None:
    answer = server.client.put(path)
    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == methods


def test_head_has_the_headers_of_get_and_no_body(server: HttpServer) -> None:
    """Every route that has GET, also one whose answer does not end."""
    paths = server.client.get("/openapi.json").json()["paths"]
    gets = [path for path, methods in paths.items() if "get" in methods]
    with long_clip(server) as id:
        for path in (*gets, "/", "/favicon.ico", "/openapi.json", "/page/main.js"):
            path = path.replace("{id}", id)
            head = server.client.head(path)
            with server.client.stream("GET", path) as get:
                assert (path, head.status_code, head.content) == (path, get.status_code, b"")
                assert head.headers.get("content-type") == get.headers.get("content-type")
    assert server.client.head("/v1/videos/x/verify").status_code == 405
    assert "HEAD" in server.client.put("/v1/engine").headers["allow"]
    metrics = server.client.get("/metrics").text
    assert 'method="HEAD",route="/v1/videos/{id}/events",status="200"' in metrics


def test_a_file_that_the_client_has_is_not_sent_again(server: HttpServer) -> None:
    (id,) = server.add(steps=1)
    for path in (f"/v1/videos/{id}/input", "/page/main.js"):
        first = server.client.get(path)
        known = {"If-None-Match": f'"other", {first.headers["etag"]}'}
        again = server.client.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        other = server.client.get(path, headers={"If-None-Match": '"other"'})
        assert (other.status_code, other.content) == (200, first.content)


def test_a_body_that_is_too_large(server: HttpServer) -> None:
    large = PHOTO + bytes(2**20)
    error = error_of(server.request(photo=large), 413, "content_too_large")
    assert error["details"] == {"limit_bytes": 2**20}

    def endless() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="input_reference"; filename="a"\r\n\r\n'
        while True:
            yield bytes(2**16)

    # Its length is not told before.
    form = {"content-type": "multipart/form-data; boundary=x"}
    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):
        answer = server.client.post("/v1/videos", content=endless(), headers=form)
        error_of(answer, 413, "content_too_large")
    assert server.client.get("/v1/models").status_code == 200


def test_a_repeated_request_makes_one_clip(server: HttpServer) -> None:
    first, again = (server.request(key="once", steps=4).json() for _ in range(2))
    error = error_of(server.request(key="once", steps=5), 422, "invalid_request")

    assert (again["id"], again["seed"]) == (first["id"], first["seed"])
    assert "key" in error["message"]
    server.wait_for(first["id"], "completed")
    assert len(list((server.folder / "photos").glob(f"{first['id']}.*"))) == 1
    assert len(list((server.folder / "photos").iterdir())) == len(server.all_ids())


def test_pages_cover_all_clips_once(server: HttpServer) -> None:
    ids = server.add(9)
    found = server.all_ids()

    assert found[-9:] == ids
    assert len(set(found)) == len(found)
    newest = server.client.get("/v1/videos?limit=3").json()
    assert [video["id"] for video in newest["data"]] == ids[:-4:-1]
    assert (newest["object"], newest["has_more"]) == ("list", True)


def test_waiting_clips_know_their_place(server: HttpServer) -> None:
    with long_clip(server) as running:
        ids = server.add(4)
        waiting = [server.video(id) for id in ids]

        queued, begun = (
            [video["id"] for video in server.client.get(f"/v1/videos?{query}").json()["data"]]
            for query in ("status=queued&order=asc", "status=in_progress")
        )
        assert (queued, begun) == (ids, [running])
        rest = server.client.get(f"/v1/videos?status=queued&after={ids[2]}").json()["data"]
        assert [video["id"] for video in rest] == [ids[1], ids[0]]
        assert server.video(running)["place"] is None
        # Those that the ranks have already, but have not begun, wait as well.
        assert [video["status"] for video in waiting] == ["queued"] * 4
        places = [video["place"] for video in waiting]
        assert places == sorted(places)
        assert len(set(places)) == 4
        etas = [video["eta_seconds"] for video in waiting]
        assert etas == sorted(etas)
        for id in ids:
            answer = server.client.post(f"/v1/videos/{id}/cancel").json()
            assert (answer["status"], answer["place"]) == ("cancelled", None)


def test_a_clip_that_is_not_completed_has_no_content(server: HttpServer) -> None:
    with long_clip(server) as id:
        for what in ("content", "metadata"):
            error = error_of(server.client.get(f"/v1/videos/{id}/{what}"), 409, "not_completed")
            assert error["details"] == {"status": "in_progress"}
        error_of(server.client.post(f"/v1/videos/{id}/verify"), 409, "not_completed")


def assert_let_go(server: HttpServer, id: str) -> None:
    ranks = server.client.get("/v1/engine").json()["ranks"]
    assert all(rank["video"] != id for rank in ranks), ranks


def test_a_cancelled_clip_stays_and_a_repeated_cancel_changes_nothing(server: HttpServer) -> None:
    with long_clip(server) as id:
        first = server.client.post(f"/v1/videos/{id}/cancel").json()
        assert_let_go(server, id)
        assert first["status"] == "cancelled"
        assert first == server.client.post(f"/v1/videos/{id}/cancel").json() == server.video(id)
    (done,) = server.add()
    made = server.wait_for(done, "completed")
    assert server.client.post(f"/v1/videos/{done}/cancel").json() == made
    assert server.client.get(f"/v1/videos/{done}/metadata").status_code == 200


@pytest.mark.parametrize("status", ["in_progress", "completed"])
def test_a_deleted_clip_is_gone_and_a_repeated_delete_says_so(
    server: HttpServer, status: str
) -> None:
    (id,) = server.add(steps=1000 if status == "in_progress" else 1)
    server.wait_for(id, status)
    answer = server.client.delete(f"/v1/videos/{id}").json()

    assert_let_go(server, id)
    ended = {"in_progress": "cancelled"}.get(status, status)
    assert answer == {"id": id, "object": "video.deleted", "deleted": True, "status": ended}
    for method, path in (("GET", ""), ("GET", "/input"), ("DELETE", "")):
        answer = server.client.request(method, f"/v1/videos/{id}{path}")
        error_of(answer, 404, "video_not_found")
    assert not [path for path in server.folder.rglob("*") if id in path.name]


def test_a_client_that_does_not_wait_for_the_answer(server: HttpServer) -> None:
    post = httpx.Client(trust_env=False, base_url=server.url).build_request(
        "POST", "/v1/videos", files={"input_reference": ("left.jpg", PHOTO)}, data={"steps": "3"}
    )
    lines = "".join(f"{name}: {value}\r\n" for name, value in post.headers.items())
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0)) as connection:
        connection.sendall(f"POST /v1/videos HTTP/1.1\r\n{lines}\r\n".encode() + post.read())

    def found() -> list[str]:
        videos = server.client.get("/v1/videos?limit=5").json()["data"]
        return [video["id"] for video in videos if video["input"]["name"] == "left.jpg"]

    wait(found)
    (id,) = found()
    server.wait_for(id, "completed")


# --- images -------------------------------------------------------------------------------------


@pytest.mark.long
def test_images_come_back_as_they_were_sent_while_they_are_there(keyed: HttpServer) -> None:
    for kind in ("PNG", "GIF"):
        file = io.BytesIO()
        Image.new("RGB", (64, 48), "teal").save(file, kind)
        (id,) = keyed.add(photo=file.getvalue(), name="../sea.html")
        answer = keyed.client.get(f"/v1/videos/{id}/input")

        assert (answer.status_code, answer.content) == (200, file.getvalue())
        assert answer.headers["content-type"] == f"image/{kind.lower()}"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"].startswith("private")
        assert "html" not in answer.headers["content-disposition"]
    keyed.wait_for(id, "completed")
    assert keyed.client.get(f"/v1/videos/{id}/input").content == file.getvalue()
    (keyed.folder / "photos" / f"{id}.gif").unlink()
    error_of(keyed.client.get(f"/v1/videos/{id}/input"), 404, "no_input")


# --- events -------------------------------------------------------------------------------------


def test_events_follow_a_clip_to_its_end(server: HttpServer) -> None:
    """Also for a client that comes back; after the last one it gets 204, as a browser needs it."""
    (id,) = server.add(steps=100)
    with stream(server, id) as events:
        first = list(itertools.islice(events, 2))
    with stream(server, id, **{"Last-Event-ID": first[-1]["event_id"]}) as events:
        found = [*first, *events]

    assert {event["id"] for event in found} == {id}
    assert found[-1]["status"] == "completed"
    ids = [event["event_id"] for event in found]
    assert len(ids) == len(set(ids))
    steps = [event["step"] for event in found]
    assert steps == sorted(steps)
    assert len(set(steps)) > 3
    seen = {"Last-Event-ID": ids[-1]}
    assert server.client.get(f"/v1/videos/{id}/events", headers=seen).status_code == 204
    with stream(server, id, **{"Last-Event-ID": "of an earlier one"}) as events:
        assert [event["event_id"] for event in events] == [ids[-1]]


def value_of(server: HttpServer, name: str) -> float:
    """The sum of a metric's series."""
    text = server.client.get("/metrics").text
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)
    assert found, name
    return sum(map(float, found))


def test_a_stream_ends_with_the_final_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a clip that ends while its present state is read."""
    settings = ServerSettings(
        config=dummy_config(2, step_seconds=0.01), folder=tmp_path, sizes=((64, 64),), max_open=9
    )
    app, service = build(settings, None)
    job = service.queue.add(dummy_job(3), max_open=None)
    video = Service.video

    def end_meanwhile(self: Service, found: Job) -> Video:
        self.queue.cancel_waiting(found.id)
        return video(self, found)

    async def follow() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get(f"/v1/videos/{job.id}/events")).text

    monkeypatch.setattr(Service, "video", end_meanwhile)
    states = re.findall(r'"status":"(\w+)"', asyncio.run(follow()))
    assert states == ["queued", "cancelled"]
    service.queue.close()


async def _looks(followers: Followers, number: int) -> float:
    """Seconds until so many looks."""
    begun = time.monotonic()
    with followers.follow():
        for _ in range(number):
            await followers.pause()
    return time.monotonic() - begun


def test_they_look_from_time_to_time_and_less_often_if_they_are_many() -> None:
    async def follow(number: int) -> float:
        followers = Followers()
        return max(await asyncio.gather(*(_looks(followers, 1) for _ in range(number))))

    assert asyncio.run(follow(1)) >= 0.25
    assert asyncio.run(follow(200)) >= 1.0


# --- about the server ---------------------------------------------------------------------------


def test_the_server_describes_itself(server: HttpServer) -> None:
    models = server.client.get("/v1/models").json()
    engine = server.client.get("/v1/engine").json()
    document = server.client.get("/openapi.json").json()

    (model,) = models["data"]
    assert server.client.get("/v1/models/dummy").json() == model
    error_of(server.client.get("/v1/models/a/b"), 404, "model_not_found")
    assert (model["id"], model["sizes"]) == ("dummy", ["1024x576"])
    assert model["limits"]["max_upload_bytes"] == 2**20
    assert model["limits"]["max_megapixels"] == 24
    for path in ("/health", "/ready"):
        said = {"status": "ok", "state": "ready", "reason": None, "ranks": 2, "restarts": 0}
        assert server.client.get(path).json() == said
    assert engine["state"] == "ready"
    assert [rank["rank"] for rank in engine["ranks"]] == [0, 1]
    assert set(engine["queue"]) == {"queued", "in_progress", "completed", "failed", "cancelled"}
    assert {"/v1/videos", "/v1/videos/{id}", "/v1/videos/{id}/events"} <= set(document["paths"])
    events = document["paths"]["/v1/videos/{id}/events"]["get"]["responses"]
    assert list(events["200"]["content"]) == ["text/event-stream"]
    assert "204" in events
    assert list(events["4XX"]["content"]) == ["application/json"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert server.client.get("/docs").status_code == 404  # its scripts are another host's


def test_spans_and_metrics_follow_a_clip(server: HttpServer) -> None:
    before = value_of(server, "svdpp_clips_total")
    (id,) = server.add(steps=20)
    server.wait_for(id, "completed")
    wait(lambda: value_of(server, "svdpp_clips_total") > before)
    spans = server.client.get("/v1/engine").json()["spans"]

    mine = [span for span in spans if span["video"] == id]
    assert {span["kind"] for span in mine} >= {"denoise"}
    assert all(time.time() - 120 < span["start"] <= span["end"] for span in mine)
    assert value_of(server, "svdpp_jobs") == len(server.all_ids())
    assert value_of(server, "svdpp_eta_error_ratio_count") > 0
    assert server.client.get("/metrics").headers["content-type"].startswith("text/plain")


def test_every_answer_has_the_headers_of_security(server: HttpServer) -> None:
    for path in ("/", "/page/main.js", "/page/page.css", "/v1/models", "/nothing"):
        headers = server.client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.long
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
    assert demo.client.get("/ready").status_code == 200
    (queue := demo.folder / "queue.sqlite3").rename(demo.folder / "away")
    assert demo.client.get("/ready").json()["reason"] == "the queue was removed or replaced"
    (demo.folder / "away").rename(queue)
    wait(lambda: demo.client.get("/ready").status_code == 200)
