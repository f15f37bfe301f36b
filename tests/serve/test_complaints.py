"""What users of other servers complain of, each with the test that shows we do not have it.

OOM leaves a job in progress for ever     test_a_clip_that_kills_ranks_fails_by_name
in_progress shown while queued            test_api.test_waiting_clips_know_their_place
DELETE that does not stop the device      test_api.test_cancel_and_delete_answer_once_...
fixed timeouts that fail valid jobs       test_a_clip_may_take_longer_than_the_timeout
abort leaks memory                        test_cancelled_clips_leave_nothing
TTL that removes files and keeps rows     test_server.test_what_is_left_goes_on_from_start_to_start,
                                          test_retention.test_rows_and_files_stay_together_...
a client's disconnect orphans its job     test_a_client_that_does_not_wait_for_the_answer,
                                          test_api.test_a_client_that_leaves_does_not_end_its_clip
queue lost on restart                     test_crashes.test_a_killed_server_then_another_...
a task visible before its row             test_an_answer_comes_after_the_row
completion that resurrects a deleted job  test_a_deleted_clip_does_not_return,
                                          test_queue.test_nothing_brings_a_removed_job_back
late or wrong metrics                     test_api.test_spans_and_metrics_follow_a_clip
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.serve.http_server import HANG_SECONDS, PHOTO, QUICK, HttpServer, error_of, wait
from tests.soak.serve_processes import ranks_of

pytest.importorskip("fastapi")
pytestmark = pytest.mark.processes


@pytest.mark.long
def test_a_clip_that_kills_ranks_fails_by_name(tmp_path: Path) -> None:
    """As the kernel does when memory ends: by SIGKILL."""
    with HttpServer(tmp_path / "data", *QUICK) as server:
        server.wait_ready()
        guilty, other = server.add(steps=1000) + server.add(steps=20)
        for deaths in (1, 2):
            wait(lambda: server.video(guilty)["step"] > 0, HANG_SECONDS)
            rank = server.video(guilty)["rank"]
            os.kill(ranks_of(server.process.pid)[rank], signal.SIGKILL)
            wait(lambda: restarts(server) == deaths, HANG_SECONDS)  # noqa: B023
            wait(lambda: server.client.get("/health").status_code == 200, HANG_SECONDS)

        server.wait_for(other, "completed")
        failed = server.video(guilty)
        assert failed["status"] == "failed"
        assert "died 2 times" in failed["error"]["message"]
        assert server.client.delete(f"/v1/videos/{guilty}").json()["deleted"]


def restarts(server: HttpServer) -> int:
    return int(server.client.get("/health").json()["restarts"])


@pytest.mark.full
@pytest.mark.long
def test_a_clip_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    """Only a rank without progress is started again."""
    options = (*QUICK, "--timeout", "4")
    with HttpServer(tmp_path / "data", *options) as server:
        server.wait_ready()
        (id,) = server.add(steps=1000)
        video = server.wait_for(id, "completed")
        assert video["completed_at"] - video["started_at"] > 4
        assert restarts(server) == 0, server.err


def test_cancelled_clips_leave_nothing(server: HttpServer) -> None:
    def cancel(number: int) -> None:
        for id in server.add(number, steps=1000):
            assert server.client.delete(f"/v1/videos/{id}").json()["status"] == "cancelled"

    cancel(3)
    before = resident_bytes(server)
    cancel(9)
    assert resident_bytes(server) < 1.05 * before
    assert not list((server.folder / "latents").iterdir())


def resident_bytes(server: HttpServer) -> float:
    text = server.client.get("/metrics").text
    return sum(map(float, re.findall(r"^svdpp_resident_bytes\{.*\} (\S+)$", text, re.M)))


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

    wait(found, HANG_SECONDS)
    (id,) = found()
    server.wait_for(id, "completed")


def test_an_answer_comes_after_the_row(server: HttpServer) -> None:
    for _ in range(3):
        (id,) = server.add(steps=1)
        with closing(sqlite3.connect(server.folder / "queue.sqlite3")) as database:
            assert database.execute("SELECT id FROM jobs WHERE id = ?", (id,)).fetchall() == [(id,)]
        assert server.client.get(f"/v1/videos/{id}").status_code == 200


def test_a_deleted_clip_does_not_return(server: HttpServer) -> None:
    """Also if it is deleted in its last steps."""
    for steps in (1, 4, 8):
        (id,) = server.add(steps=steps)
        status = server.client.delete(f"/v1/videos/{id}").json()["status"]
        assert status in ("cancelled", "completed")
        (later,) = server.add(steps=4)
        server.wait_for(later, "completed")
        error_of(server.client.get(f"/v1/videos/{id}"), 404, "video_not_found")
        assert not [path for path in server.folder.rglob("*") if id in path.name]
