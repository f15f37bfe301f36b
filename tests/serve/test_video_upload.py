"""The service for clips from a video: uploads are decoded apart, and clips have a proof."""

from __future__ import annotations

import base64
import io
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from svdpp.errors import InputError
from svdpp.media.inputs import example_photos
from svdpp.serve.job import new_id
from svdpp.serve.photos import PhotoFolder
from tests.cli.test_video_input import save_video
from tests.models.tiny_families import save_tiny, save_tiny_wan
from tests.serve.http_server import PHOTO, HttpServer, error_of, schema_of_form
from tests.serve.test_page import driver, opened
from tests.serve.test_serve_families import WAN

__all__ = ["driver"]  # a fixture


def test_an_uploaded_video_is_decoded_apart(tmp_path: Path) -> None:
    data, folder = Path(save_video(tmp_path / "a.mp4")).read_bytes(), tmp_path / "photos"
    photos, id = PhotoFolder(folder), new_id()
    kept = photos.keep(io.BytesIO(data), id, "a.avi", 5)
    assert (kept.path.name, kept.width, kept.height) == (f"{id}.mp4", 64, 48)
    assert kept.path.read_bytes() == data
    with pytest.raises(InputError, match=r"^'a.avi' has 7 of the 8 frames that the clip takes$"):
        photos.keep(io.BytesIO(data), new_id(), "a.avi", 8)
    with pytest.raises(InputError, match=r"^'a.avi' cannot be decoded as a video"):
        photos.keep(io.BytesIO(data[: len(data) // 2]), new_id(), "a.avi", 5)
    with pytest.raises(InputError, match=r"^'a.avi' is not an image"):
        photos.keep(io.BytesIO(data), new_id(), "a.avi")
    assert [path.name for path in folder.iterdir()] == [kept.path.name]


@pytest.mark.processes
@pytest.mark.long
def test_clips_are_made_from_videos(tmp_path: Path) -> None:
    data, folder = (
        Path(save_video(tmp_path / "a.mp4")).read_bytes(),
        str(save_tiny_wan(tmp_path / "wan")),
    )
    asked = ("--model", folder, "--family", "wan_v2v")
    with HttpServer(tmp_path / "data", *WAN, *asked) as server:
        server.wait_ready()
        schema = schema_of_form(server)
        assert schema["properties"]["input_reference"]["description"].startswith("The video: MP4")
        (id,) = server.add(photo=data, name="a.mp4", prompt="the sea", strength=0.5)
        assert server.wait_for(id, "completed")["strength"] == 0.5
        answer = server.client.get(f"/v1/videos/{id}/input")
        assert (answer.content, answer.headers["content-type"]) == (data, "video/mp4")
        text = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        form = {"input_reference": text, "prompt": "the sea"}
        answer = server.client.post("/v1/videos/sync", json=form)
        assert answer.status_code == 200, answer.text
        few = server.request(photo=data, name="a.mp4", prompt="the sea", frames=9)
        assert "has 7 of the 9 frames" in error_of(few, 422, "invalid_image")["message"]


@pytest.mark.processes
@pytest.mark.long
def test_further_videos_are_kept_beside_the_image(driver: Any, tmp_path: Path) -> None:
    file = Path(save_video(tmp_path / "a.mp4"))
    folder = str(save_tiny("wan_animate", tmp_path / "animate"))
    pose, face = ("pose.mp4", file.read_bytes()), ("face.jpg", PHOTO)
    with HttpServer(tmp_path / "data", *WAN, "--model", folder) as server:
        server.wait_ready()
        inputs = server.client.get("/v1/models").json()["data"][0]["inputs"]
        assert inputs["pose_video"] == inputs["face_video"] == "needed"
        missing = server.request(prompt="the sea", pose_video=pose)
        faults = error_of(missing, 422, "invalid_request")["details"]["faults"]
        assert [fault["field"] for fault in faults] == ["face_video"]
        strange = server.request(prompt="the sea", pose_video=pose, mask_video=face)
        assert "mask_video" in error_of(strange, 422, "invalid_request")["message"]
        few = server.request(prompt="the sea", pose_video=face, face_video=pose, frames=9)
        assert error_of(few, 422, "invalid_image")["details"]["field"] == "face_video"
        assert not list((tmp_path / "data" / "photos").iterdir())
        given = {"prompt": "the sea", "pose_video": pose, "face_video": face, "key": "a"}
        (id,) = server.add(**given)
        video = server.wait_for(id, "completed")
        assert video["videos"].keys() == {"pose_video", "face_video"}
        uploads = f"/v1/videos/{video['id']}/input?field="
        assert server.client.get(f"{uploads}pose_video").content == pose[1]
        error_of(server.client.get(f"{uploads}mask_video"), 404, "no_input")
        assert server.request(**given).json()["id"] == video["id"]
        other = server.request(**{**given, "face_video": pose})
        assert "with another video" in error_of(other, 422, "invalid_request")["message"]
        with contextmanager(opened)(driver, server) as page:
            page.fill("prompt", "the sea")
            page.choose(*example_photos()[:1])
            page.one("[name=pose_video]").send_keys(str(file))
            page.one("#make").click()
            page.wait_text("#error-face_video", "Choose a file.")
            page.one("[name=face_video]").send_keys(str(example_photos()[0]))
            page.one("#make").click()
            page.wait(lambda: len(page.all(".card")) == 2)
        (newest,) = server.client.get("/v1/videos?limit=1").json()["data"]
        assert newest["videos"] == video["videos"]
        for id in (newest["id"], video["id"]):
            assert server.client.delete(f"/v1/videos/{id}").status_code == 200
        assert not list((tmp_path / "data" / "photos").iterdir())
