"""Servers with data folders of their own, one PostgreSQL, and a real S3 server for the files."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from svdpp.errors import RequestError
from svdpp.serve.clips import ToRequest
from svdpp.serve.database import AwayError
from svdpp.serve.job import new_id
from svdpp.serve.queue import JobQueue
from svdpp.serve.store import FileStore, _sizes, remove_leftovers
from svdpp.worker import tensor_files
from tests.serve.engines import dummy_config, dummy_job
from tests.serve.http_server import DEMO, DUMMY, PHOTO, HttpServer, error_of, wait
from tests.serve.swift import Swift
from tests.serve.test_crashes import wait_made

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.processes, pytest.mark.long]

Start = Callable[..., HttpServer]
_STEPS = 40
_SLOW = (*DUMMY, "--time-scale", "0.4", "--lease", "3")


@pytest.fixture
def start(start: Start, bucket: str) -> Start:
    """The same, with files in the bucket."""
    return partial(start, "--files", bucket)


@pytest.fixture
def store(tmp_path: Path, bucket: str) -> FileStore:
    (tmp_path / "own").mkdir()
    return FileStore(tmp_path / "own", bucket)


def _content(server: HttpServer, id: str, kind: str = "content", **headers: str) -> bytes:
    answer = server.client.get(f"/v1/videos/{id}/{kind}", headers=headers)
    assert answer.status_code in (200, 206), answer.text
    return answer.content


def _wait_empty(store: FileStore) -> None:
    """Latent checkpoints go within a second."""
    wait(lambda: set(store.objects()) == {"queue.id"}, lambda: str(store.objects()))


def test_any_server_makes_and_serves_a_clip(start: Start, store: FileStore) -> None:
    first = start(*DEMO, folder="first")
    second = start(*DEMO, "--grace", "0", folder="second")
    ids = [*first.add(1), *second.add(1)]
    made = {id: first.wait_for(id, "completed") for id in ids}
    for id in made:
        clip = _content(first, id)
        assert _content(second, id) == clip
        assert _content(second, id, Range="bytes=10-19") == clip[10:20]
        assert _content(second, id, "input") == _content(first, id, "input") == PHOTO
    wait(lambda: not store.objects("latents"))
    names = {name for name in store.objects() if name != "queue.id"}
    clips = {f"clips/{id}-1.mp4{end}" for id in ids for end in ("", ".json")}
    assert names == clips | {f"photos/{id}.jpg" for id in ids}
    metadata = [second.client.get(f"/v1/videos/{id}/metadata").json() for id in ids]
    assert all(metadata)
    assert second.client.post(f"/v1/videos/{ids[0]}/verify").status_code == 202
    wait(lambda: second.video(ids[0])["proof"] == "equal")
    for server, id in zip((first, second), ids, strict=True):
        assert server.client.delete(f"/v1/videos/{id}").json()["deleted"]
    _wait_empty(store)


def test_another_server_goes_on_with_the_clip_of_a_killed_one(
    start: Start, store: FileStore
) -> None:
    servers = [start(*_SLOW, folder=name) for name in ("first", "second")]
    (id,) = servers[0].add(seed=5, steps=_STEPS)
    wait(lambda: store.objects("latents"), lambda: f"{servers[0].video(id)}")
    claims = [server.client.get("/v1/servers").json()["data"][0]["claims"] for server in servers]
    killed, other = servers if claims[0] else reversed(servers)
    killed.stop(signal.SIGKILL)
    wait_made(other, {id: 5})
    metadata = other.client.get(f"/v1/videos/{id}/metadata").json()
    assert metadata["resumed_from_step"] > 0
    assert other.client.delete(f"/v1/videos/{id}").json()["deleted"]
    _wait_empty(store)


def test_clips_survive_the_store(start: Start, swift: Swift) -> None:
    """What is in progress is finished and published later; new requests are told to come back."""
    server = start(*DEMO, "--steps", "30")
    (id,) = server.add(seed=1)
    wait(lambda: server.video(id)["step"] >= 1, lambda: f"{server.video(id)}")
    swift.stop()
    try:
        wait(lambda: server.client.get("/ready").status_code == 503)
        answer = server.request(seed=2)
        error_of(answer, 503, "storage_failed")
        assert int(answer.headers["Retry-After"]) > 0
        assert server.client.get("/health").status_code == 200
        wait(lambda: server.video(id)["step"] == 30)
        assert server.video(id)["status"] == "in_progress"
    finally:
        swift.start()
    server.wait_for(id, "completed")
    server.wait_ready()
    server.wait_for(*server.add(seed=2, steps=4), "completed")
    assert "the store is back" in server.err
    assert server.err.count("cannot be used") == 1
    assert "Traceback" not in server.err
    for secret in swift.environment.values():
        assert secret not in server.err or secret.startswith(("http://", "us-"))


def test_leftovers_are_removed_from_store_and_folder(database: str, store: FileStore) -> None:
    with closing(JobQueue(store.folder, url=database, store=store)) as queue:
        for name in ("photos", "clips", "latents"):
            (store.folder / name).mkdir()
        job = queue.add(dummy_job(1, photo=""), max_open=None)
        for _ in range(2):
            taken = queue.take_next()
            assert taken is not None
            queue.put_back(job.id, taken.token, counts=False)
        taken = queue.take_next()
        assert taken is not None
        own = [store.folder / "clips" / f"{job.id}-{number}.mp4" for number in (2, 3)]
        lost = [store.folder / "photos" / f"{new_id()}.jpg", own[0]]
        for path in (*own, lost[0]):
            path.write_bytes(b"content")
            store.put(path)
        seen = remove_leftovers(queue, set(), in_use=[job.id])
        assert len(store.objects()) == 4
        remove_leftovers(queue, seen, in_use=[job.id])
        assert set(store.objects()) == {"queue.id", f"clips/{own[1].name}"}
        assert not lost[0].exists()
        assert own[1].exists()
        remove_leftovers(queue, remove_leftovers(queue, set()))
        assert not own[1].exists()
        store.fetch(own[1])
        assert own[1].read_bytes() == b"content"
        assert _sizes(queue).total() == 7


def test_what_the_store_lacks_stays_missing(store: FileStore) -> None:
    store.put(store.folder / "queue.id")  # there is none
    assert store.mark() == ""
    store.belong_to("")
    store.fetch(store.folder / "none")
    assert not (store.folder / "none").exists()
    store.remove(store.folder / "none")
    assert list(store.folder.iterdir()) == []


def test_a_bucket_that_does_not_exist_is_refused(store: FileStore) -> None:
    (store.folder / "queue.id").write_text("id")
    other = FileStore(store.folder, "s3://none/x")
    with pytest.raises(AwayError, match=r"cannot be used: .*does not exist"):
        other.put(store.folder / "queue.id")


def test_a_store_that_does_not_answer_is_asked_once(
    store: FileStore, swift: Swift, tmp_path: Path
) -> None:
    swift.stop()
    try:
        path = tmp_path / "own" / "file"
        path.write_bytes(b"")
        for _ in range(2):
            with pytest.raises(AwayError, match="cannot be used"):
                store.put(path)
        with pytest.raises(AwayError):
            store.check()
    finally:
        swift.start()
    store._look()
    store.put(path)


def test_a_checkpoint_that_is_fetched_is_not_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older ones of the same clip are, as nobody needs them any more."""
    store = FileStore(tmp_path, f"memory://{new_id()}")
    to_request = ToRequest(dummy_config(1), None, store)
    to_request.latents_folder.mkdir()
    job = dummy_job(1, photo="", token=2)
    key = to_request(job).request.latents_key
    assert key is not None
    for step in (2, 4):
        path = tensor_files.path_of(to_request.latents_folder, key, step)
        path.write_bytes(b"of another server")
        store.put(path)
        path.unlink()
    fetch = store.fetch

    def published(path: Path) -> None:
        to_request.publish()
        fetch(path)

    monkeypatch.setattr(store, "fetch", published)
    assert to_request(job).request.done_steps == 4
    to_request.publish()
    assert set(store.objects()) == {f"latents/{path.name}"}


def test_an_unknown_kind_of_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be opened"):
        FileStore(tmp_path, "nothing://x/y")
