"""`GET /v1/videos/{id}/input`: the photograph, for its owner alone."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from tests.serve.http_server import PHOTO, HttpServer, error_of

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.processes, pytest.mark.long]

TYPES = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "BMP": "bmp", "TIFF": "tiff", "GIF": "gif"}


@pytest.mark.parametrize("kind", TYPES)
def test_the_photograph_comes_back_as_it_was_sent(keyed: HttpServer, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "teal").save(file, kind)
    (id,) = keyed.add(photo=file.getvalue(), name="../sea.html")

    answer = keyed.client.get(f"/v1/videos/{id}/input")

    assert answer.status_code == 200
    assert answer.content == file.getvalue()
    assert answer.headers["content-type"] == f"image/{TYPES[kind]}"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"].startswith("private")
    assert "html" not in answer.headers["content-disposition"]


def test_only_the_owner_gets_it(keyed: HttpServer) -> None:
    (id,) = keyed.add(photo=PHOTO)
    path = f"/v1/videos/{id}/input"

    bob = {"Authorization": f"Bearer {keyed.other_key}"}
    error_of(keyed.client.get(path, headers=bob), 404, "video_not_found")
    error_of(keyed.client.get(path, headers={"Authorization": ""}), 401, "invalid_api_key")
    assert keyed.client.get(path).content == PHOTO

    keyed.wait_for(id, "completed")
    assert keyed.client.get(path).content == PHOTO
    keyed.client.delete(f"/v1/videos/{id}")
    error_of(keyed.client.get(path), 404, "video_not_found")


def test_a_photograph_that_is_gone(keyed: HttpServer) -> None:
    (id,) = keyed.add()
    keyed.wait_for(id, "completed")
    for file in (keyed.folder / "photos").glob(f"{id}.*"):
        file.unlink()
    error_of(keyed.client.get(f"/v1/videos/{id}/input"), 404, "no_input")
