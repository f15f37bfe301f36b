"""What users of other servers complain of: leaks, fixed timeouts, jobs that stay in progress."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.serve.http_server import HANG_SECONDS, PHOTO, QUICK, HttpServer, wait
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
