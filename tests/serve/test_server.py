"""Server as a process: errors before its start, its start, and its end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from svdpp.media.output_files import private_files
from svdpp.media.video import clip_sha256
from svdpp.serve.auth import add_key
from svdpp.serve.job import JobState, new_id
from svdpp.serve.queue import JobQueue
from svdpp.serve.server import build
from tests.support.engines import job_of
from tests.support.http_server import (
    DEMO,
    DUMMY,
    PHOTO,
    QUICK,
    HttpServer,
    ServerHere,
    asked,
    error_of,
    wait,
)
from tests.support.shell import DEMO as ON_CPU
from tests.support.shell import Answer, assert_error, svdpp_here

# --- errors before the start --------------------------------------------------------------------


def serve_refused(tmp_path: Path, *options: str) -> Answer:
    """Run `svdpp serve` with options that are refused, and return the command's answer."""
    return svdpp_here("serve", "--data", str(tmp_path / "data"), *DUMMY, *options)


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        answer = serve_refused(tmp_path, "--port", str(port))

    assert_error(answer, 2, f"port {port}: Address already in use", f"--port {port + 1}")
    assert not (tmp_path / "data").exists()


def test_its_options_reach_ranks_and_queue(tmp_path: Path) -> None:
    seconds = ("--heartbeat-timeout", "7", "--timeout", "90", "--start-timeout", "80")
    limits = ("--max-queue", "3", "--keep-days", "2", "--keep-gb", "1.5", "--max-upload-mb", "4")
    limits += ("--max-steps", "40", "--max-frames", "30")
    settings, _ = asked(tmp_path / "data", *DUMMY, *seconds, *limits)

    config = settings.config
    assert config.heartbeat_timeout_seconds == 7
    assert (config.timeout_seconds, config.start_timeout_seconds) == (90, 80)
    assert config.parallel.split == "alternating"
    assert (settings.max_open, settings.upload_bytes) == (3, 4 * 2**20)
    assert (settings.max_steps, settings.max_frames) == (40, 30)
    assert (settings.keep_seconds, settings.keep_bytes) == (2 * 86400, 1_500_000_000)


HOOKS = ("--callback-hosts", "a.example", "--callback-secret-file")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--host", "0.0.0.0"), 2, ("--host 0.0.0.0", "--api-key-file", "--new-key")),
        (("--host", "clips.example"), 2, ("--host clips.example", "--api-key-file")),
        (("--host", "192.0.2.1", "--api-key-file", "keys"), 2, ("cannot listen on 192.0.2.1",)),
        (("--api-key-file", "none"), 7, ("none",)),
        (("--api-key-file", "open"), 2, ("0644", "chmod 600")),
        (("--max-steps", "3"), 2, ("--max-steps 3 is less than the 8 steps", "--steps 3")),
        (("--max-frames", "3"), 2, ("--max-frames 3 is less than the 14 frames", "--frames 3")),
        (("--queue", "mysql://db/svdpp"), 2, ("--queue takes a URL such as postgresql://",)),
        (("--lease", "0"), 2, ("--lease",)),
        (("--callback-hosts", "a.example"), 2, ("needs --callback-secret-file",)),
        ((*HOOKS, "keys"), 7, ("line 1 is not whsec_ and 24 to 65 bytes", "openssl rand")),
        (("--model", "./empty"), 5, ("empty",)),
        (("--data", "keys"), 8, ("keys",)),
        (("--keep-days", "nan"), 2, ("--keep-days must be",)),
        (("--sizes", "1024*576"), 2, ("--sizes takes sizes such as 1024x576",)),
        (("--sizes", "1024x577"), 2, ("--height must be a multiple of 8",)),
        ((*ON_CPU, "--time-scale", "0.1"), 2, ("--time-scale works only with the dummy model",)),
        (("--new-key", "alice"), 2, ("--new-key needs --api-key-file",)),
        (("--new-key", "al ice", "--api-key-file", "keys.txt"), 2, ("the name must be",)),
    ],
)
def test_a_start_that_is_refused_leaves_no_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    code: int,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, mode in (("keys", 0o600), ("open", 0o644)):
        add_key(tmp_path / name, "alice")
        (tmp_path / name).chmod(mode)
    assert_error(serve_refused(tmp_path, "--port", "0", *options), code, *words)
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_folder_with_files_of_the_users_own(tmp_path: Path) -> None:
    """A data folder with the user's own files is refused without `--adopt`.

    A folder whose queue is lost is refused too.
    """
    folder = tmp_path / "data"
    (folder / "photos").mkdir(parents=True)
    (folder / "photos" / "cat.jpg").write_text("mine")
    assert_error(serve_refused(tmp_path, "--port", "0"), 2, "photos", "--adopt")
    id = new_id()
    JobQueue(folder, adopts=True).close()
    (folder / "photos" / f"{id}.jpg").write_bytes(PHOTO)
    (folder / "queue.sqlite3").unlink()
    assert_error(serve_refused(tmp_path, "--port", "0"), 2, "queue.sqlite3", "--adopt")
    with ServerHere(folder, *QUICK, "--adopt") as server:
        (moved,) = folder.glob(f"lost+found/*/{id}.jpg")
        assert moved.read_bytes() == PHOTO
        assert f"moved to {moved.parent}" in server.err
    assert (folder / "photos" / "cat.jpg").read_text() == "mine"


@pytest.mark.parametrize("missing", ["fastapi", "prometheus_client"])
def test_a_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    answer = serve_refused(tmp_path)
    assert_error(answer, 2, f"not installed: {missing}", "pip install 'svdpp[serve]'")


# --- keys ---------------------------------------------------------------------------------------


def new_key(file: Path, name: str, *options: str) -> Answer:
    return svdpp_here("serve", "--new-key", name, "--api-key-file", str(file), *options)


def test_a_new_key_is_shown_once_and_stored_as_a_hash(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "keys.txt"
    keys = [new_key(file, name).out.strip() for name in ("alice", "bob", "alice")]
    keys.append(json.loads(new_key(file, "carol", "--json").out)["key"])
    text = file.read_text()

    assert len(set(keys)) == 4
    assert not [key for key in keys if key in text]
    assert [line.split()[0] for line in text.splitlines()] == ["alice", "bob", "alice", "carol"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("not keys\n")
    assert_error(new_key(file, "alice"), 7, "line 1")
    assert file.read_text() == "not keys\n"


@pytest.mark.slow
def test_owners_see_only_their_own_clips(keyed: HttpServer) -> None:
    (id,) = keyed.add(steps=20)
    bob = {"Authorization": f"Bearer {keyed.other_key}"}
    error_of(httpx.get(f"{keyed.url}/v1/videos/{id}", trust_env=False), 401, "invalid_api_key")
    with httpx.Client(trust_env=False, base_url=keyed.url, headers=bob) as other:
        paths = other.get("/openapi.json").json()["paths"]
        assert "security" in paths["/v1/videos"]["post"]
        assert "security" not in paths["/health"]["get"]
        assert other.get("/v1/videos").json()["data"] == []
        for method, path in (
            *(("GET", path) for path in ("", "/content", "/metadata", "/events", "/input")),
            *(("POST", "/verify"), ("POST", "/cancel"), ("DELETE", "")),
        ):
            answer = other.request(method, f"/v1/videos/{id}{path}")
            error_of(answer, 404, "video_not_found")
        error_of(other.get(f"/v1/videos?after={id}"), 404, "video_not_found")
        keyed.wait_for(id, "completed")
        spans = other.get("/v1/engine").json()["spans"]
        assert spans
        assert {span["video"] for span in spans} == {"other"}
    assert keyed.client.get("/v1/videos").json()["data"][0]["id"] == id
    assert keyed.client.headers["Authorization"].split()[1] not in keyed.err


# --- the start ----------------------------------------------------------------------------------

SMALL = ("--frames", "2", "--height", "64", "--width", "64")


@pytest.mark.slow
@pytest.mark.full
def test_a_clip_of_the_demo_model_from_end_to_end(tmp_path: Path) -> None:
    with HttpServer(tmp_path / "data", *DEMO, *SMALL) as server:
        server.wait_ready()
        starting, ready = server.err.splitlines()
        told = r"starting demo at http://127\.0\.0\.1:\d+ with 2 ranks on cpu; data in '.*data'"
        assert re.fullmatch(told, starting)
        assert ready == "ready to make clips"
        (id,) = server.add(seed=3)
        server.wait_for(id, "completed")
        path = f"/v1/videos/{id}/content"
        whole = server.client.get(path)
        part = server.client.get(path, headers={"Range": "bytes=10-19"})
        head = server.client.head(path)
        metadata = server.client.get(f"/v1/videos/{id}/metadata").json()

        assert (whole.status_code, whole.headers["content-type"]) == (200, "video/mp4")
        assert whole.content[4:8] == b"ftyp"
        assert (part.status_code, part.content) == (206, whole.content[10:20])
        assert part.headers["content-range"] == f"bytes 10-19/{len(whole.content)}"
        assert (head.headers["content-length"], head.content) == (str(len(whole.content)), b"")
        assert metadata["seed"] == 3
        clip = server.folder / "clips" / f"{id}.mp4"
        assert metadata["file_sha256"] == clip_sha256(clip)
        for written in (clip, Path(f"{clip}.json")):  # written by a rank
            assert written.stat().st_mode & 0o777 == 0o600
        assert server.client.post(f"/v1/videos/{id}/verify").status_code == 202
        wait(lambda: server.video(id)["proof"] == "equal", lambda: server.err)


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_first_signal_ends_it_in_order_and_a_second_one_at_once(tmp_path: Path) -> None:
    """The first signal drains the server; a second one ends it at once.

    The first signal goes to the ranks too, as systemd and Ctrl-C send it.
    """
    with HttpServer(tmp_path / "data", *QUICK, "--grace", "600") as server:
        server.wait_ready()
        (left,) = server.add(steps=1000)
        server.wait_for(left, "in_progress")
        os.killpg(server.process.pid, signal.SIGINT)
        wait(lambda: server.client.get("/ready").status_code == 503)
        assert server.client.get("/ready").json()["reason"] == "the server is shutting down"
        answer = server.request()
        error_of(answer, 503, "closing")
        assert int(answer.headers["retry-after"]) > 0
        assert server.video(left)["status"] == "in_progress"
        assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        assert server.err.count("\n") == 2, server.err  # no rank was restarted
    _goes_on_and_ends_without_grace(tmp_path / "data", left)


def _goes_on_and_ends_without_grace(folder: Path, left: str) -> None:
    """Check that a restarted server continues its clip, and ends at once if no grace is set.

    An open event stream, or a client that waits for its clip, does not delay the end.
    """
    with ServerHere(folder, *QUICK, "--keep-days", "1") as server, ThreadPoolExecutor() as threads:
        server.wait_ready()
        wait(lambda: server.video(left)["step"] > 0)
        assert server.client.delete(f"/v1/videos/{left}").json()["status"] == "cancelled"
        done, last = *server.add(steps=1), *server.add(steps=1000)
        video = server.wait_for(done, "completed")
        assert video["expires_at"] - video["completed_at"] == 86400

        def newest() -> str:
            return str(server.client.get("/v1/videos?limit=1").json()["first_id"])

        with server.client.stream("GET", f"/v1/videos/{last}/events") as events:
            next(events.iter_lines())
            wait(lambda: server.video(last)["step"] > 0)
            files = {"input_reference": ("a.jpg", PHOTO)}
            answer = threads.submit(server.client.post, "/v1/videos/sync", files=files)
            wait(lambda: newest() != last)
            waits = newest()
            server.stop()
        assert error_of(answer.result(), 503, "closing")["details"] == {"id": waits}


def test_its_files_are_its_users_own_whatever_the_folder_is(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "clips").mkdir(parents=True, mode=0o755)
    with private_files():
        _, service = build(*asked(folder, *DUMMY, "--adopt"))
        service.queue.close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    assert {modes[name] for name in ("photos", "clips", "latents")} == {0o700}
    assert {mode for name, mode in modes.items() if (folder / name).is_file()} == {0o600}


@pytest.mark.slow
def test_one_key_cannot_have_all_streams(
    keyed: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svdpp.serve.routes.MAX_STREAMS_OF_KEY", 1)
    (id,) = keyed.add(steps=1000)
    bob = {"Authorization": f"Bearer {keyed.other_key}"}
    other = keyed.client.post("/v1/videos", files={"input_reference": PHOTO}, headers=bob).json()
    with keyed.events(id):
        answer = keyed.client.get(f"/v1/videos/{id}/events")
        assert error_of(answer, 429, "too_many_streams")["details"] == {"limit": 1}
        with keyed.events(other["id"], **bob) as events:
            assert next(events)["id"] == other["id"]
    keyed.client.delete(f"/v1/videos/{id}")
    keyed.client.delete(f"/v1/videos/{other['id']}", headers=bob)


class _DeafTerminal(ServerHere):
    """Server whose stderr fails with "disk full" when the server reports that it is ready."""

    def _note(self, text: str) -> None:
        if text == "ready to make clips\n":
            self.err += "written"
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._note(text)


@pytest.mark.slow
def test_it_ends_in_order_also_if_its_readiness_cannot_be_reported(tmp_path: Path) -> None:
    with _DeafTerminal(tmp_path / "data", *QUICK) as server:
        wait(lambda: "written" in server.err, lambda: server.err)
        assert server.client.get("/ready").status_code == 200
        server._server._ending.set()
        server._thread.join(60)
        assert not server._thread.is_alive()
        assert "the readiness of the ranks could not be reported: [Errno 28]" in server.err


@pytest.mark.slow
def test_without_its_queue_it_says_so_and_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "data" / "queue.sqlite3"
    with ServerHere(tmp_path / "data", *QUICK, grace=600) as server:
        server.wait_ready()
        (running,) = server.add(steps=1000)
        server.wait_for(running, "in_progress")
        path.rename(tmp_path / "away")
        reason = server.client.get("/ready").json()["reason"]
        assert reason == "the queue was removed or replaced"
        error_of(server.request(), 503, "storage_failed")
        wait(lambda: "was removed or replaced" in server.err)
        path.write_bytes((tmp_path / "away").read_bytes())  # a copy is not the same queue
        error_of(server.client.delete(f"/v1/videos/{running}"), 503, "storage_failed")
        (tmp_path / "away").rename(path)
        wait(lambda: "can be used again" in server.err)
        server.add()
        (tmp_path / "data").rename(tmp_path / "gone")
        error_of(server.request(), 503, "storage_failed")
        wait(lambda: server.err.count("was removed or replaced") == 2)
        assert server.stop() == 0
        assert server.err.count("was removed or replaced") == 2, server.err
        assert server.err.count("ERROR") == 2, server.err
    (tmp_path / "gone").rename(tmp_path / "data")
    with contextlib.closing(JobQueue(tmp_path / "data")) as store:
        assert running in [job.id for job in store.requeue_expired()]


@pytest.mark.slow
@pytest.mark.full
def test_under_torchrun_the_clip_in_progress_is_finished_within_the_grace(tmp_path: Path) -> None:
    """The clip in progress is finished, although torchrun sends SIGTERM to all ranks at once."""
    launcher = (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--log-dir", str(tmp_path / "log"), "--shutdown-timeout", "100"),
    )
    options = (*DUMMY, "--time-scale", "0.3", "--grace", "100")
    with HttpServer(tmp_path / "data", *options, launcher=launcher) as server:
        server.wait_ready()
        (id,) = server.add()
        server.wait_for(id, "in_progress")
        server.stop(signal.SIGTERM)
        assert "SignalException" in server.err, "torchrun itself ends by the signal"
    with contextlib.closing(JobQueue(tmp_path / "data")) as store:
        assert job_of(store, id).state is JobState.COMPLETED
