"""`GET /v1/videos/{id}/input`: the photograph, for its owner alone."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from PIL import Image

from svdpp.serve.auth import add_key
from tests.serve.http_server import PHOTO, QUICK, HttpServer, error_of

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.processes, pytest.mark.long]

TYPES = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "BMP": "bmp", "TIFF": "tiff", "GIF": "gif"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    return {"file": str(file), **{owner: add_key(file, owner) for owner in ("alice", "bob")}}


@pytest.fixture(scope="module")
def server(keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    options = (*QUICK, "--api-key-file", keys["file"])
    with HttpServer(tmp_path_factory.mktemp("data"), *options, key=keys["alice"]) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("kind", TYPES)
def test_the_photograph_comes_back_as_it_was_sent(server: HttpServer, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "teal").save(file, kind)
    (id,) = server.add(photo=file.getvalue(), name="../sea.html")

    answer = server.client.get(f"/v1/videos/{id}/input")

    assert answer.status_code == 200
    assert answer.content == file.getvalue()
    assert answer.headers["content-type"] == f"image/{TYPES[kind]}"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"].startswith("private")
    assert "html" not in answer.headers["content-disposition"]


def test_only_the_owner_gets_it(server: HttpServer, keys: dict[str, str]) -> None:
    (id,) = server.add(photo=PHOTO)
    path = f"/v1/videos/{id}/input"

    bob = {"Authorization": f"Bearer {keys['bob']}"}
    error_of(server.client.get(path, headers=bob), 404, "video_not_found")
    error_of(server.client.get(path, headers={"Authorization": ""}), 401, "invalid_api_key")
    assert server.client.get(path).content == PHOTO

    server.wait_for(id, "completed")
    assert server.client.get(path).content == PHOTO
    server.client.delete(f"/v1/videos/{id}")
    error_of(server.client.get(path), 404, "video_not_found")


def test_a_photograph_that_is_gone(server: HttpServer) -> None:
    (id,) = server.add()
    server.wait_for(id, "completed")
    for file in (server.folder / "photos").glob(f"{id}.*"):
        file.unlink()
    error_of(server.client.get(f"/v1/videos/{id}/input"), 404, "no_input")
