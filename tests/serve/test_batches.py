"""Batches over HTTP, in the format of OpenAI's Batch API, at real servers; some tests kill them."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from svdpp.serve.auth import Owner, add_key
from svdpp.serve.batch_table import BatchState
from svdpp.serve.schemas import ApiError
from svdpp.serve.server import build
from svdpp.serve.service import Service
from tests.support.http_server import PHOTO, QUICK, HttpServer, ServerHere, asked, error_of, wait

pytestmark = pytest.mark.slow

LINES = {"Content-Type": "application/jsonl"}


def picture(number: int) -> bytes:
    """Return the bytes of a small PNG file, different ones for each number."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (number % 256, number // 256, 7)).save(file, "PNG")
    return file.getvalue()


def line(custom_id: str, image: bytes = PHOTO, **body: Any) -> str:
    body = {"input_reference": b64encode(image).decode(), **body}
    values = {"custom_id": custom_id, "method": "POST", "url": "/v1/videos", "body": body}
    return json.dumps(values)


def request_batch(server: HttpServer, *lines: str, **headers: str) -> dict[str, Any]:
    """Request a batch with the given lines from a server, and return the batch's JSON."""
    content = "\n".join(lines)
    answer = server.client.post("/v1/batches", content=content, headers={**LINES, **headers})
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


def wait_ended(server: HttpServer, id: str) -> dict[str, Any]:
    """Wait until a batch of a server has ended, and return the batch's JSON."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(server.client.get(f"/v1/batches/{id}").json())
        return found["status"] in ("completed", "failed", "cancelled")

    wait(has_ended, lambda: f"{found}\n{server.err}")
    return found


def results(server: HttpServer, file_id: str) -> list[dict[str, Any]]:
    answer = server.client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/jsonl"
    return [json.loads(text) for text in answer.text.splitlines()]


def test_a_batch_as_clients_of_openai_send_it(server: HttpServer) -> None:
    lines = "\n".join([line("first", seed=5), "", line("Füße", steps=3)])
    sent = {"file": ("jobs.jsonl", lines.encode())}
    answer = server.client.post("/v1/files", files=sent, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    file = answer.json()
    assert (file["object"], file["purpose"], file["filename"]) == ("file", "batch", "jobs.jsonl")
    assert file["bytes"] == len(lines.encode())
    assert server.client.get(f"/v1/files/{file['id']}").json() == file
    assert server.client.get(f"/v1/files/{file['id']}/content").content == lines.encode()

    asked = {"input_file_id": file["id"], "endpoint": "/v1/videos", "completion_window": "24h"}
    answer = server.client.post("/v1/batches", json={**asked, "metadata": {"day": "Monday"}})
    assert answer.status_code == 200, answer.text
    batch = answer.json()
    assert batch["status"] == "validating"
    assert batch["input_file_id"] == file["id"]
    done = wait_ended(server, batch["id"])
    assert (done["status"], done["metadata"]) == ("completed", {"day": "Monday"})
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert done["created_at"] <= done["in_progress_at"] <= done["completed_at"]
    first, second = results(server, done["output_file_id"])
    assert (first["custom_id"], second["custom_id"]) == ("first", "Füße")
    assert (first["response"]["status_code"], first["error"]) == (200, None)
    video = first["response"]["body"]
    assert (video["status"], video["seed"], video["batch_id"]) == ("completed", 5, batch["id"])
    assert video == server.video(first["response"]["request_id"])
    about = server.client.get(f"/v1/files/{done['output_file_id']}").json()
    content = server.client.get(f"/v1/files/{done['output_file_id']}/content").content
    assert (about["purpose"], about["bytes"]) == ("batch_output", len(content))
    assert done["error_file_id"] is None
    # The input file is deleted, because its lines have become videos with their own images.
    gone = error_of(server.client.get(f"/v1/files/{file['id']}"), 404, "file_not_found")
    assert batch["id"] in gone["hint"]
    listed = server.client.get(f"/v1/videos?batch_id={batch['id']}&order=asc").json()["data"]
    assert [each["custom_id"] for each in listed] == ["first", "Füße"]
    page = server.client.get("/v1/batches?limit=1").json()
    assert page["data"] == [done]


def test_the_same_lines_are_one_batch(server: HttpServer) -> None:
    lines = [line("a"), line("b")]
    first, again = (request_batch(server, *lines, **{"Idempotency-Key": "k"}) for _ in range(2))
    assert first["id"] == again["id"]
    # Seeds that the server draws differ between the lines.
    done = wait_ended(server, first["id"])
    seeds = {each["response"]["body"]["seed"] for each in results(server, done["output_file_id"])}
    assert len(seeds) == 2
    assert request_batch(server, *lines, **{"Idempotency-Key": "k"}) == done
    headers = {**LINES, "Idempotency-Key": "k"}
    other = server.client.post("/v1/batches", content=line("c"), headers=headers)
    assert "another file of lines" in error_of(other, 422, "invalid_request")["message"]
    for batch in server.client.get("/v1/batches").json()["data"]:
        wait_ended(server, batch["id"])
    assert server.client.get(f"/v1/files/{first['input_file_id']}").status_code == 404


def test_the_faults_of_all_lines_are_answered_and_nothing_is_stored(server: HttpServer) -> None:
    before = server.client.get("/v1/batches").json()
    lines = [
        line("a"),
        line("b", steps=0, stepz=3),
        "{",
        line("a"),
        line("c", size="64x64"),
        '{"custom_id": "d", "method": "GET", "url": "/v1/videos", "body": {}}',
        line("e", callback_url="https://example.org"),
        '{"custom_id": "f", "custom_id": "f"}',
        line("g", prompt=7),
    ]
    answer = server.client.post("/v1/batches", content="\n".join(lines), headers=LINES)
    error = error_of(answer, 422, "invalid_batch")
    assert error["message"].startswith("8 lines have faults: line 2: steps must be 1 or more")
    found = [
        (each["line"], each["custom_id"], each["param"], each["code"])
        for each in error["details"]["faults"]
    ]
    assert found == [
        (2, "b", "steps", "invalid_request"),
        (2, "b", "stepz", "invalid_request"),
        (3, None, None, "invalid_json"),
        (4, "a", "custom_id", "repeated_custom_id"),
        (5, "c", "size", "wrong_size"),
        (6, "d", "method", "invalid_line"),
        (7, "e", "callback_url", "callback_refused"),
        (8, "f", "custom_id", "repeated_field"),
        (9, "g", "prompt", "invalid_request"),
    ]
    assert "did you mean steps?" in error["details"]["faults"][1]["hint"]
    assert server.client.get("/v1/batches").json() == before
    assert not list((server.folder / "photos").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ({"content": b" \n", "headers": LINES}, 422, "empty_batch"),
        ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, ""),
        ({"json": {"input_file_id": "file_x", "endpoint": "/v1/videos"}}, 404, "file_not_found"),
        ({"json": {"input_file_id": "x", "endpoint": "/v1/chat"}}, 422, "invalid_request"),
        ({"json": {"input_file_id": "x", "metadata": {"a": 1}}}, 422, "invalid_request"),
        ({"json": {"input_file_id": "x", "metadata": None}}, 404, "file_not_found"),
        ({"json": {"input_file": "x"}}, 422, "invalid_request"),
        ({"files": {"file": (None, "no file")}}, 422, "invalid_request"),
        ({"files": {"file": ("a", b""), "metadata": (None, "{")}}, 422, "invalid_request"),
        ({"files": {"file": ("a", b""), "more": (None, "1")}}, 422, "invalid_request"),
    ],
    ids=str,
)
def test_another_body_is_refused(
    server: HttpServer, sent: dict[str, Any], status: int, code: str
) -> None:
    error_of(server.client.post("/v1/batches", **sent), status, code or "unsupported_media_type")


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server: HttpServer) -> None:
    head = "POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/jsonl\r\n"
    answer = server.raw(f"{head}Content-Length: {200 * 2**20 + 1}\r\n\r\n".encode())
    assert b" 413 " in answer
    assert b"split the file into several batches" in answer


def test_an_image_that_cannot_be_read_fails_the_batch(server: HttpServer) -> None:
    lines = [line("a"), line("b", b"no image"), line("c", picture(1)[:60])]
    batch = wait_ended(server, request_batch(server, *lines)["id"])
    assert batch["status"] == "failed"
    faults = [(each["line"], each["param"], each["code"]) for each in batch["errors"]["data"]]
    assert faults == [(number, "input_reference", "invalid_image") for number in (2, 3)]
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
    listed = server.client.get(f"/v1/videos?batch_id={batch['id']}").json()
    assert listed["data"] == []


def test_a_cancelled_batch_keeps_what_is_finished(server: HttpServer) -> None:
    lines = [line("quick", steps=1), *(line(f"{number}", steps=500) for number in range(20))]
    id = request_batch(server, *lines)["id"]
    counts = lambda: server.client.get(f"/v1/batches/{id}").json()["request_counts"]  # noqa: E731
    wait(lambda: counts()["completed"] == 1, lambda: server.err)
    answer = server.client.post(f"/v1/batches/{id}/cancel")
    assert answer.json()["status"] in ("cancelling", "cancelled")
    batch = wait_ended(server, id)
    assert batch["request_counts"] == {"total": 21, "completed": 1, "failed": 20}
    assert [each["custom_id"] for each in results(server, batch["output_file_id"])] == ["quick"]
    (error, *others) = results(server, batch["error_file_id"])
    assert (error["response"], error["error"]["code"]) == (None, "batch_cancelled")
    assert len(others) == 19
    assert server.client.post(f"/v1/batches/{id}/cancel").json() == batch


def test_a_key_sees_its_own_batches_and_has_its_turn(tmp_path: Path) -> None:
    alice, bob = (add_key(tmp_path / "keys", name) for name in ("alice", "bob"))
    text = (tmp_path / "keys").read_text().splitlines()
    (tmp_path / "keys").write_text(f"{text[0]} open=60\n{text[1]}\n")
    options = (*QUICK, "--max-queue", "1", "--api-key-file", str(tmp_path / "keys"))
    with ServerHere(tmp_path / "data", *options, key=alice) as server:
        server.wait_ready()
        batch = request_batch(server, *(line(f"{number}", steps=40) for number in range(50)))
        too_many = [line(f"{number}") for number in range(11)]
        send = {"content": "\n".join(too_many), "headers": LINES}
        full = error_of(server.client.post("/v1/batches", **send), 429, "queue_full")
        assert full["details"]["limit"] == 60
        many = {**send, "content": "\n".join(line(f"{number}") for number in range(61))}
        error_of(server.client.post("/v1/batches", **many), 422, "batch_too_large")
        path = f"/v1/batches/{batch['id']}"
        counts = lambda: server.client.get(path).json()["request_counts"]  # noqa: E731
        wait(lambda: counts()["completed"] >= 1, lambda: server.err)
        output = f"/v1/files/file_{batch['id'].removeprefix('batch_')}_output/content"
        assert len(server.client.get(output).text.splitlines()) >= 1

        headers = {"Authorization": f"Bearer {bob}"}
        others = httpx.Client(base_url=server.url, headers=headers, trust_env=False)
        with others:
            error_of(others.get(path), 404, "batch_not_found")
            error_of(others.get(output), 404, "file_not_found")
            error_of(others.get(f"/v1/files/{batch['input_file_id']}"), 404, "file_not_found")
            error_of(others.get(f"/v1/videos?batch_id={batch['id']}"), 404, "batch_not_found")
            assert others.get("/v1/batches").json()["data"] == []
            answer = others.post("/v1/videos", files={"input_reference": ("a.jpg", PHOTO)})
            assert answer.status_code == 202, answer.text
            id = answer.json()["id"]
            assert answer.json()["place"] <= 2, "more than what the ranks have already"
            wait(lambda: others.get(f"/v1/videos/{id}").json()["status"] == "completed")
        assert counts()["completed"] < 40, "it has waited for the batch"


def test_a_batch_outlives_its_server(tmp_path: Path) -> None:
    """Each line makes exactly one clip, although the server is killed twice.

    It is killed while it decodes images, and again while it makes clips.
    """
    folder, number = tmp_path / "data", 16
    with HttpServer(folder, *QUICK) as server:
        lines = [line(f"{index}", picture(index), seed=index, steps=1) for index in range(number)]
        batch = request_batch(server, *lines)
        assert batch["status"] == "validating"
        server.stop(signal.SIGKILL)
    with HttpServer(folder, *QUICK) as server:
        path = f"/v1/batches/{batch['id']}"
        counts = lambda: server.client.get(path).json()["request_counts"]  # noqa: E731
        wait(lambda: counts()["completed"] > 1, lambda: server.err)
        server.stop(signal.SIGKILL)
    with HttpServer(folder, *QUICK) as server:
        done = wait_ended(server, batch["id"])
        assert done["request_counts"] == {"total": number, "completed": number, "failed": 0}
        found = results(server, done["output_file_id"])
        seeds = [(each["custom_id"], each["response"]["body"]["seed"]) for each in found]
        assert seeds == [(f"{index}", index) for index in range(number)]
        assert len(server.all_ids()) == number
        assert not list((folder / "photos").glob("*.jsonl"))


@pytest.mark.full
def test_another_server_of_the_fleet_goes_on_with_a_batch(start: Callable[..., HttpServer]) -> None:
    first, other = start(*QUICK, "--lease", "2"), start(*QUICK, "--lease", "2")
    lines = [line(f"{index}", picture(index), steps=1) for index in range(8)]
    batch = request_batch(first, *lines)
    first.stop(signal.SIGKILL)
    done = wait_ended(other, batch["id"])
    assert done["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    found = results(other, done["output_file_id"])
    assert [each["custom_id"] for each in found] == [f"{index}" for index in range(8)]


@contextlib.contextmanager
def unstarted(folder: Path) -> Iterator[Service]:
    """Yield the service of a server in a data folder, whose threads and ranks do not start."""
    _, service = build(*asked(folder, *QUICK))
    try:
        yield service
    finally:
        service.queue.close()


def test_a_batch_that_fails_after_a_restart_cancels_its_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line's image is damaged after the first line has become a job."""
    monkeypatch.setattr("svdpp.serve.batches._STORED_LINES", 1)
    good = [line("a", steps=1000), line("b")]
    with unstarted(tmp_path / "data") as service:
        batches = service.batches
        batch = batches.create(Owner(), None, source=io.BytesIO("\n".join(good).encode()))
        steps = batches._process_batch(batch.id)
        for _ in ("the images are decoded", "the first line is stored"):
            next(steps)
        steps.close()
        file = batches.files.get(batch.input_file, Owner())
        damaged = [good[0], line("b", b"no image")]
        batches.files.content(file).write_text("\n".join(damaged))
    with ServerHere(tmp_path / "data", *QUICK) as server:
        found = wait_ended(server, batch.id)
        assert found["status"] == "failed"
        assert [fault["line"] for fault in found["errors"]["data"]] == [2]
        (video,) = server.client.get(f"/v1/videos?batch_id={batch.id}").json()["data"]
        server.wait_for(video["id"], "cancelled")
        found = server.client.get(f"/v1/batches/{batch.id}").json()
        assert found["request_counts"] == {"total": 2, "completed": 0, "failed": 1}
        (error,) = results(server, found["error_file_id"])
        assert (error["custom_id"], error["error"]["code"]) == ("a", "batch_cancelled")
        assert not list((tmp_path / "data/photos").glob("*.jsonl"))


def test_a_batch_whose_lines_are_missing_fails(tmp_path: Path) -> None:
    with unstarted(tmp_path / "data") as service:
        batches = service.batches
        batch = batches.create(Owner(), None, source=io.BytesIO(line("a").encode()))
        file = batches.files.get(batch.input_file, Owner())
        batches.files.content(file).unlink()
        batches._run_once()
        found = batches.get(batch.id, Owner())
        assert (found.state, found.errors[0]["code"]) == (BatchState.FAILED, "file_not_found")


def test_a_batch_that_is_cancelled_after_a_failure_leaves_nothing_in_memory(tmp_path: Path) -> None:
    with unstarted(tmp_path / "data") as service:
        batches = service.batches
        batch = batches.create(Owner(), None, source=io.BytesIO(line("a").encode()))
        steps = batches._process_batch(batch.id)
        next(steps)
        steps.close()  # as after a failure of the disk
        assert batches._decoded[batch.id]
        batches.cancel(batch.id, Owner())
        batches._run_once()
        assert batches._decoded == {}


def test_a_limit_of_one_clip_is_told_in_the_singular(tmp_path: Path) -> None:
    owner = Owner("ann", max_open=1)
    with unstarted(tmp_path / "data") as service:
        create = service.batches.create
        with pytest.raises(ApiError, match=r"may have at most 1 open clip$"):
            create(owner, None, source=io.BytesIO(f"{line('a')}\n{line('b')}".encode()))
        create(owner, None, source=io.BytesIO(line("a").encode()))
        words = "the 1 line of the batch and the 1 open clip of this key exceed the limit of 1 open"
        with pytest.raises(ApiError, match=rf"{words} clip$"):
            create(owner, None, source=io.BytesIO(line("b").encode()))
