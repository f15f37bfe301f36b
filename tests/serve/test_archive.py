"""Zip archives of finished clips: contents, refusals, and failures while an archive is sent."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile

import httpx
import pytest

from svdpp.serve.archive import CLIPS_FILE, ZipMember, zip_members
from svdpp.serve.job import Job
from svdpp.serve.sqlite import BackendUnavailableError
from tests.support.http_server import HttpServer, error_of, wait


@pytest.fixture(scope="module")
def ids(server: HttpServer) -> list[str]:
    """Ids of three finished clips on a server. Two clips' names differ only in case."""
    names = ("sea.jpg", "SEA.jpg", "Zürich am See.png")
    found = [server.add(name=name, seed=7)[0] for name in names]
    for id in found:
        server.wait_for(id, "completed")
        (server.folder / "clips" / f"{id}.mp4").write_bytes(id.encode() * 100_000)
    return found


def _archive(server: HttpServer, **query: object) -> zipfile.ZipFile:
    answer = server.client.get("/v1/videos/archive", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/zip"
    assert 'attachment; filename="clips-2' in answer.headers["content-disposition"]
    return zipfile.ZipFile(io.BytesIO(answer.content))


@pytest.mark.slow
def test_an_archive_has_all_clips_by_readable_names(server: HttpServer, ids: list[str]) -> None:
    archive = _archive(server)
    assert archive.testzip() is None
    *names, last = archive.namelist()
    assert names == ["sea-seed7.mp4", "SEA-seed7-2.mp4", "Zürich am See-seed7.mp4"]
    assert [archive.read(name) for name in names] == [id.encode() * 100_000 for id in ids]
    assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    assert last == CLIPS_FILE
    lines = [json.loads(line) for line in archive.read(last).splitlines()]
    assert [(line["file"], line["id"], line["seed"]) for line in lines] == [
        (name, id, 7) for name, id in zip(names, ids, strict=True)
    ]


@pytest.mark.slow
def test_an_archive_of_some_clips_and_one_without_its_file(
    server: HttpServer, ids: list[str]
) -> None:
    assert _archive(server, ids=[ids[2], ids[0], ids[2]]).namelist() == [
        "Zürich am See-seed7.mp4",
        "sea-seed7.mp4",
        CLIPS_FILE,
    ]
    (empty,) = server.add()
    server.wait_for(empty, "completed")
    archive = _archive(server, ids=empty)  # the dummy model writes no files
    assert archive.namelist() == [CLIPS_FILE]
    assert json.loads(archive.read(CLIPS_FILE))["file"] is None
    server.client.delete(f"/v1/videos/{empty}")


@pytest.mark.slow
def test_an_archive_is_refused_before_it_begins(
    server: HttpServer, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get = server.client.get
    error_of(get("/v1/videos/archive?ids=none"), 404, "video_not_found")
    (running,) = server.add(steps=1000)
    path = f"/v1/videos/archive?ids={ids[0]}&ids={running}"
    error_of(get(path), 409, "not_completed")
    server.client.delete(f"/v1/videos/{running}")
    monkeypatch.setattr("svdpp.serve.routes.MAX_CLIPS", 2)
    error = error_of(get("/v1/videos/archive"), 413, "too_many_clips")
    assert error["details"] == {"field": "ids", "limit": 2}
    assert server.client.head("/v1/videos/archive").status_code == 405


@pytest.mark.slow
def test_an_archive_that_cannot_be_finished_is_none(
    server: HttpServer, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get = server.service.queue.get

    def get_or_fail(id: str) -> Job | None:
        if id == ids[1]:
            raise BackendUnavailableError("the queue is away")
        return get(id)

    monkeypatch.setattr(server.service.queue, "get", get_or_fail)
    with pytest.raises(httpx.RemoteProtocolError):
        server.client.get("/v1/videos/archive")
    wait(lambda: "an archive could not be completed: the queue is away" in server.err)
    assert "Traceback" not in server.err


@pytest.mark.slow
def test_an_archive_has_the_clips_of_its_key_alone(keyed: HttpServer) -> None:
    (id,) = keyed.add(name="mine.jpg", seed=1)
    keyed.wait_for(id, "completed")
    (keyed.folder / "clips" / f"{id}.mp4").write_bytes(b"mp4")
    assert "mine-seed1.mp4" in _archive(keyed).namelist()
    bob = {"Authorization": f"Bearer {keyed.other_key}"}
    get = keyed.client.get
    error_of(get("/v1/videos/archive", headers=bob), 404, "no_clips")
    error_of(get(f"/v1/videos/archive?ids={id}", headers=bob), 404, "video_not_found")
    error_of(get("/v1/videos/archive", headers={"Authorization": ""}), 401, "invalid_api_key")
    keyed.client.delete(f"/v1/videos/{id}")


def test_the_memory_of_an_archive_does_not_grow_with_its_files() -> None:
    class Zeros(io.RawIOBase):
        left = 64 * 2**20

        def read(self, size: int = -1) -> bytes:
            size = min(size, self.left)
            self.left -= size
            return bytes(size)

    members = (ZipMember(f"{number}.mp4", 0.0, Zeros(), Zeros.left) for number in range(2))
    tracemalloc.start()
    num_bytes = sum(map(len, zip_members(members)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes > 2 * Zeros.left
    assert peak < 4 * 2**20
