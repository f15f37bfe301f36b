"""Servers with separate data folders that share a PostgreSQL, and a real S3 server for files."""

from __future__ import annotations

import io
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from svdpp.errors import RequestError
from svdpp.serve.clips import RequestBuilder
from svdpp.serve.job import new_id
from svdpp.serve.sqlite import BackendUnavailableError
from svdpp.serve.store import FileStore
from svdpp.worker import tensor_files
from tests.support.backends import Swift
from tests.support.engines import dummy_config, dummy_job
from tests.support.http_server import DEMO, PHOTO, HttpServer, error_of, wait

pytestmark = pytest.mark.slow

Pair = tuple[HttpServer, HttpServer]


@pytest.fixture
def store(tmp_path: Path, bucket: str) -> FileStore:
    (tmp_path / "own").mkdir()
    return FileStore(tmp_path / "own", bucket)


@pytest.mark.full
def test_servers_share_a_bucket_outlive_it_and_one_of_them_is_killed(
    start: Callable[..., HttpServer], bucket: str, store: FileStore, swift: Swift
) -> None:
    clips = (*DEMO, "--frames", "2", "--height", "64", "--width", "64", "--steps", "60")
    options = (*clips, "--grace", "0", "--lease", "3", "--files", bucket)
    first = start(*options, folder="first")
    _clips_survive_the_store(first, swift)
    pair = first, start(*options, folder="second")
    _any_server_makes_and_serves_a_clip(pair, store)
    _another_server_goes_on_with_the_clip_of_a_killed_one(pair, store)


def _content(server: HttpServer, id: str, kind: str = "content", **headers: str) -> bytes:
    answer = server.client.get(f"/v1/videos/{id}/{kind}", headers=headers)
    assert answer.status_code in (200, 206), answer.text
    return answer.content


def _proven(server: HttpServer, id: str) -> None:
    assert server.client.post(f"/v1/videos/{id}/verify").status_code == 202
    wait(lambda: server.video(id)["proof"] == "equal", lambda: f"{server.video(id)}")


def _clips_survive_the_store(server: HttpServer, swift: Swift) -> None:
    """Check that a clip in progress is finished while the store is down, and published later.

    New requests get status 503.
    """
    (id,) = server.add()
    wait(lambda: server.video(id)["step"] >= 1, lambda: f"{server.video(id)}")
    swift.stop()
    try:
        wait(lambda: server.client.get("/ready").status_code == 503)
        answer = server.request(seed=2)
        error_of(answer, 503, "storage_unavailable")
        assert int(answer.headers["Retry-After"]) > 0
        assert server.client.get("/health").status_code == 200
        wait(lambda: server.video(id)["step"] == 60)
        assert server.video(id)["status"] == "in_progress"
    finally:
        swift.start()
    server.wait_for(id, "completed")
    server.wait_ready()
    assert "the store is available again" in server.err
    assert server.err.count("cannot be used") == 1
    assert "Traceback" not in server.err
    for secret in swift.environment.values():
        assert secret not in server.err or secret.startswith(("http://", "us-"))
    assert server.client.delete(f"/v1/videos/{id}").json()["deleted"]


def _any_server_makes_and_serves_a_clip(pair: Pair, store: FileStore) -> None:
    first, second = pair
    ids = [*first.add(steps=2), *second.add(steps=2)]
    for id in ids:
        first.wait_for(id, "completed")
        archive = second.client.get("/v1/videos/archive", params={"ids": id}).content
        clip = _content(first, id)
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            assert files.read(files.namelist()[0]) == clip
        assert _content(second, id) == clip
        assert _content(second, id, Range="bytes=10-19") == clip[10:20]
        assert _content(second, id, "input") == _content(first, id, "input") == PHOTO
        assert _content(second, id, "metadata") == _content(first, id, "metadata")
    wait(lambda: not store.objects("latents"))
    clips = {f"clips/{id}-1.mp4{end}" for id in ids for end in ("", ".json")}
    assert set(store.objects()) == {"queue.id", *clips, *(f"photos/{id}.jpg" for id in ids)}
    for server, id in zip(pair, ids, strict=True):
        assert server.client.delete(f"/v1/videos/{id}").json()["deleted"]
    assert set(store.objects()) == {"queue.id"}


def _another_server_goes_on_with_the_clip_of_a_killed_one(pair: Pair, store: FileStore) -> None:
    (id,) = pair[0].add(steps=120)
    wait(lambda: store.objects("latents"), lambda: f"{pair[0].video(id)}")
    claims = [server.client.get("/v1/servers").json()["data"][0]["claims"] for server in pair]
    killed, other = pair if claims[0] else reversed(pair)
    killed.stop(signal.SIGKILL)
    other.wait_for(id, "completed")
    assert other.client.get(f"/v1/videos/{id}/metadata").json()["resumed_from_step"] > 0
    _proven(other, id)
    assert other.client.delete(f"/v1/videos/{id}").json()["deleted"]
    # Latent checkpoints are removed within a second.
    wait(lambda: set(store.objects()) == {"queue.id"}, lambda: f"{store.objects()}")


def test_what_a_store_lacks_stays_missing_and_a_bucket_that_does_not_exist_is_refused(
    store: FileStore,
) -> None:
    path = store.folder / "queue.id"
    store.put(path)  # the local file does not exist
    assert store.read_queue_id() == ""
    store.bind_to_queue("")
    store.fetch(store.folder / "none")
    assert not (store.folder / "none").exists()
    store.remove(store.folder / "none")
    assert list(store.folder.iterdir()) == []

    path.write_text("id")
    other = FileStore(store.folder, "s3://none/x")
    for _ in range(2):  # the second pass sends no request
        with pytest.raises(BackendUnavailableError, match=r"cannot be used: .*does not exist"):
            other.put(path)
    with pytest.raises(RequestError, match="cannot be opened"):
        FileStore(store.folder, "nothing://x/y")


def test_a_checkpoint_that_is_fetched_is_not_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A latent checkpoint is not removed while it is being fetched.

    Older checkpoints of the same clip are removed, because no server needs them.
    """
    store = FileStore(tmp_path, f"memory://{new_id()}")
    request_builder = RequestBuilder(dummy_config(1), None, store)
    request_builder.latents_folder.mkdir()
    job = dummy_job(1, input_file="", fencing_token=2)
    key = request_builder(job).request.latents_key
    assert key is not None
    for step in (2, 4):
        path = tensor_files.checkpoint_path(request_builder.latents_folder, key, step)
        path.write_bytes(b"of another server")
        store.put(path)
        path.unlink()
    fetch = store.fetch

    def published(path: Path) -> None:
        request_builder.publish_latents()
        fetch(path)

    monkeypatch.setattr(store, "fetch", published)
    assert request_builder(job).request.done_steps == 4
    request_builder.publish_latents()
    assert set(store.objects()) == {f"latents/{path.name}"}
