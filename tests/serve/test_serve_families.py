"""Service with models that take prompts, videos or references, such as Wan and Wan Animate."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from svdpp.config import SAMPLING_CLASSES, ClipRequest, ModelConfig, WanSampling
from svdpp.config.families.minimax_h3 import MiniMaxH3ReferencesSampling
from svdpp.config.families.wan import WanVaceSampling
from svdpp.errors import InputError
from svdpp.media.images import read_image
from svdpp.media.inputs import example_images
from svdpp.media.video import frames_sha256
from svdpp.serve.job import new_id
from svdpp.serve.request_schema import Capabilities
from svdpp.serve.routes import _request_body
from svdpp.serve.schemas import FIELDS, ApiError
from svdpp.serve.uploads import UploadStore
from svdpp.worker.tensor_files import tensor_sha256
from tests.serve.test_page import driver, opened
from tests.support.builders import save_tiny_lora
from tests.support.http_server import PHOTO, HttpServer, ServerHere, error_of, wait
from tests.support.pictures import save_video
from tests.support.range_checks import whole_clip
from tests.support.tiny_families import save_tiny, save_tiny_wan

__all__ = ["driver"]  # a fixture

CPU = ("--device", "cpu", "--world", "2", "--threads", "1", "--max-prompt-tokens", "8")
WAN = (*CPU, "--steps", "4", "--height", "32", "--width", "32", "--frames", "5")
PROMPT = "the sea at night"
_BASE64 = base64.b64encode(PHOTO).decode()
SAMPLING = WanSampling(
    num_inference_steps=4, height=32, width=32, num_frames=5, max_sequence_length=8
)


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a tiny Wan with two experts, for text-to-video."""
    return save_tiny_wan(tmp_path_factory.mktemp("wan"), boundary_ratio=0.875)


@pytest.fixture(scope="module")
def wan(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with ServerHere(tmp_path_factory.mktemp("data"), *WAN, "--model", str(wan_folder)) as server:
        server.wait_ready()
        yield server


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_clip_from_text_has_the_bits_of_diffusers(wan: HttpServer, wan_folder: Path) -> None:
    prompts = {"prompt": PROMPT, "negative_prompt": "blurred"}
    (id,) = wan.add(photo=None, **prompts, guidance_scale_2=3, seed=1)
    video = wan.wait_for(id, "completed")

    assert {**prompts, "guidance_scale_2": 3.0, "input": None}.items() <= video.items()
    metadata = wan.client.get(f"/v1/videos/{id}/metadata").json()
    sampling = replace(SAMPLING, guidance_scale_2=3.0)
    latents, frames, _ = whole_clip(
        ModelConfig(name=str(wan_folder)), sampling, ClipRequest(seed=1, **prompts), None
    )
    expected = (tensor_sha256(latents[-1]), frames_sha256(frames))
    assert (metadata["latents_sha256"], metadata["frames_sha256"]) == expected
    assert (metadata["prompt"], metadata["split"]) == (PROMPT, "balanced")
    assert wan.client.get(f"/v1/videos/{id}/content").content[4:8] == b"ftyp"
    error_of(wan.client.get(f"/v1/videos/{id}/input"), 404, "no_input")
    assert list((wan.folder / "photos").iterdir()) == []
    assert PROMPT not in wan.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"prompt": ""}, "prompt is missing"),
        ({"prompt": "x" * 20_001}, "prompt"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "has no effect"),
        ({"photo": PHOTO}, "input_reference is unknown"),
        ({"last_image": "x"}, "last_image is unknown"),
        ({"decode_timestep": 0.1}, "decode_timestep is unknown"),
        ({"frames": 6}, "frames must be a multiple of 4 plus 1"),
        ({"flow_shift": 100}, "expert"),
        ({"steps": 1}, "would run the only step"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_request_is_refused_at_once(
    wan: HttpServer, form: dict[str, Any], words: str
) -> None:
    answer = wan.request(**{"photo": None, "prompt": PROMPT, **form})
    error = error_of(answer, 422, "invalid_request")
    assert words in error["message"]
    assert "--" not in error["message"]


@pytest.mark.slow
def test_the_model_says_what_its_form_has(wan: HttpServer) -> None:
    (model,) = wan.client.get("/v1/models").json()["data"]

    inputs = dict.fromkeys(("input_reference", "last_image", "references"), "refused")
    inputs |= {"prompt": "needed", "negative_prompt": "optional"}
    assert (model["family"], model["inputs"]) == ("wan", inputs)
    assert {"guidance_scale", "guidance_scale_2", "flow_shift"} <= set(model["fields"])
    assert not {"motion_bucket_id", "fit"} & {*model["fields"], *model["defaults"]}
    assert model["limits"]["frames_unit"] == 4
    assert model["limits"]["frames_remainder"] == 1
    form = wan.form_schema()
    assert form["required"] == ["prompt"]
    assert "input_reference" not in form["properties"]


#: Options for a distilled LoRA with four steps, as in docs/lora.md.
FOUR_STEPS = ("--world", "4", "--steps", "4", "--guidance-scale", "1", "--param", "flow_shift=5")


@pytest.mark.slow
@pytest.mark.full
def test_clips_with_loras_are_proven(tmp_path: Path) -> None:
    """A clip with a LoRA for each expert passes its verification.

    There is no guidance, and each of four ranks does one step.
    """
    folder = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875)
    high = save_tiny_lora(folder, tmp_path / "high.safetensors", seed=1)
    low = save_tiny_lora(folder, tmp_path / "low.safetensors", part="transformer_2", seed=2)
    loras = ("--lora", f"{high}:high", "--lora", f"{low}:low")
    with ServerHere(tmp_path / "data", *WAN, "--model", str(folder), *FOUR_STEPS, *loras) as server:
        server.wait_ready()
        (id,) = server.add(photo=None, prompt="the sea", seed=7)
        server.wait_for(id, "completed")
        server.client.post(f"/v1/videos/{id}/verify")
        wait(lambda: server.video(id)["proof"] == "equal", lambda: f"{server.video(id)}")
        metadata = server.client.get(f"/v1/videos/{id}/metadata").json()
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (high, low)]
    assert [each["sha256"] for each in metadata["lora"]] == hashes


@pytest.mark.slow
def test_an_uploaded_video_is_decoded_apart(tmp_path: Path) -> None:
    data, folder = Path(save_video(tmp_path / "a.mp4")).read_bytes(), tmp_path / "photos"
    uploads, id = UploadStore(folder), new_id()
    kept = uploads.save(io.BytesIO(data), id, "a.avi", 5)
    assert (kept.path.name, kept.width, kept.height) == (f"{id}.mp4", 64, 48)
    assert kept.path.read_bytes() == data
    with pytest.raises(InputError, match=r"^'a.avi' has 7 of the 8 frames that the clip takes$"):
        uploads.save(io.BytesIO(data), new_id(), "a.avi", 8)
    with pytest.raises(InputError, match=r"^'a.avi' is damaged or cut off after frame \d"):
        uploads.save(io.BytesIO(data[: len(data) // 2]), new_id(), "a.avi", 5)
    with pytest.raises(InputError, match=r"^'a.avi' is a video, but an image is needed"):
        uploads.save(io.BytesIO(data), new_id(), "a.avi")
    assert [path.name for path in folder.iterdir()] == [kept.path.name]


@pytest.mark.slow
def test_clips_are_made_from_videos(tmp_path: Path) -> None:
    data = Path(save_video(tmp_path / "a.mp4")).read_bytes()
    model = ("--model", str(save_tiny_wan(tmp_path / "wan")), "--family", "wan_v2v")
    with ServerHere(tmp_path / "data", *WAN, *model) as server:
        server.wait_ready()
        schema = server.form_schema()
        assert schema["properties"]["input_reference"]["description"].startswith("Input video: MP4")
        (id,) = server.add(photo=data, name="a.mp4", prompt="the sea", strength=0.5)
        assert server.wait_for(id, "completed")["strength"] == 0.5
        answer = server.client.get(f"/v1/videos/{id}/input")
        assert (answer.content, answer.headers["content-type"]) == (data, "video/mp4")
        text = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        form = {"input_reference": text, "prompt": "the sea"}
        answer = server.client.post("/v1/videos/sync", json=form)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def animate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Server of Wan Animate, which takes an image, a pose video and a face video."""
    folder = str(save_tiny("wan_animate", tmp_path_factory.mktemp("animate")))
    with ServerHere(tmp_path_factory.mktemp("data"), *WAN, "--model", folder) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Path of the pose video, and the files for the pose and face in a request for Wan Animate."""
    file = Path(save_video(tmp_path_factory.mktemp("video") / "a.mp4"))
    pose, face = ("pose.mp4", file.read_bytes()), ("face.jpg", PHOTO)
    return file, {"pose_video": pose, "face_video": face}


def _delete_clips(server: HttpServer, *ids: str) -> None:
    """Delete clips of a server, and check that their uploads are deleted too."""
    for id in ids:
        assert server.client.delete(f"/v1/videos/{id}").status_code == 200
    assert not list((server.folder / "photos").iterdir())


@pytest.mark.slow
def test_further_videos_are_checked(
    animate: HttpServer, uploads: tuple[Path, dict[str, Any]]
) -> None:
    _, videos = uploads
    pose, face = videos["pose_video"], videos["face_video"]
    inputs = animate.client.get("/v1/models").json()["data"][0]["inputs"]
    assert inputs["pose_video"] == inputs["face_video"] == "needed"
    missing = animate.request(prompt="the sea", pose_video=pose)
    faults = error_of(missing, 422, "invalid_request")["details"]["faults"]
    assert [fault["field"] for fault in faults] == ["face_video"]
    strange = animate.request(prompt="the sea", pose_video=pose, mask_video=face)
    assert "mask_video" in error_of(strange, 422, "invalid_request")["message"]
    few = animate.request(prompt="the sea", pose_video=face, face_video=pose, frames=9)
    assert error_of(few, 422, "invalid_image")["details"]["field"] == "face_video"
    assert not list((animate.folder / "photos").iterdir())


@pytest.mark.slow
@pytest.mark.full
def test_further_videos_are_kept_beside_the_image(
    animate: HttpServer, uploads: tuple[Path, dict[str, Any]]
) -> None:
    _, videos = uploads
    request = {"prompt": "the sea", **videos, "key": "a"}
    (id,) = animate.add(**request)
    video = animate.wait_for(id, "completed")
    assert video["videos"].keys() == {"pose_video", "face_video"}
    url = f"/v1/videos/{id}/input?field="
    assert animate.client.get(f"{url}pose_video").content == videos["pose_video"][1]
    error_of(animate.client.get(f"{url}mask_video"), 404, "no_input")
    assert animate.request(**request).json()["id"] == id
    other = animate.request(**{**request, "face_video": videos["pose_video"]})
    assert "with another further input" in error_of(other, 422, "invalid_request")["message"]
    _delete_clips(animate, id)


@pytest.mark.slow
@pytest.mark.full
def test_the_page_asks_for_further_videos(
    driver: Any, animate: HttpServer, uploads: tuple[Path, dict[str, Any]]
) -> None:
    file, videos = uploads
    with contextmanager(opened)(driver, animate) as page:
        page.fill("prompt", "the sea")
        page.choose(*example_images()[:1])
        page.one("[name=pose_video]").send_keys(str(file))
        page.one("#make").click()
        page.wait_text("#error-face_video", "Choose a file.")
        page.one("[name=face_video]").send_keys(str(example_images()[0]))
        page.one("#make").click()
        page.wait(lambda: len(page.all(".card")) == 1)
    (newest,) = animate.client.get("/v1/videos?limit=1").json()["data"]
    sha256 = {name: hashlib.sha256(content).hexdigest() for name, (_, content) in videos.items()}
    assert newest["videos"] == {name: {"sha256": value} for name, value in sha256.items()}
    animate.wait_for(newest["id"], "completed")
    _delete_clips(animate, newest["id"])


@pytest.mark.slow
def test_the_page_makes_clips_from_text(driver: Any, wan: HttpServer) -> None:
    with contextmanager(opened)(driver, wan) as page:
        page.one("textarea[name=prompt]")
        page.wait(lambda: "Loading" not in page.text("#clips"))
        before = len(page.all(".card"))
        assert page.all("#drop") == []
        page.run("document.querySelector('details').open = true")
        assert page.all("[name=flow_shift]")
        assert page.all("[name=motion_bucket_id], [name=fit]") == []

        page.one("#make").click()
        assert page.text("#error-prompt") == "Say what happens in the clip."
        page.fill("prompt", "<b>The sea</b> " + "at night, " * 20)
        page.fill("frames", 6)
        page.one("#make").click()
        assert "1, 5, 9" in page.text("#error-frames")
        page.fill("frames", 5)
        page.one("#make").click()
        page.wait(lambda: len(page.all(".card")) == before + 1)
        title = page.text(".card .title")
        assert title.startswith("<b>The sea</b> at night")
        assert len(title) == 60

        page.one(".card button[aria-label^=Make]").click()
        page.wait(lambda: len(page.all(".card")) == before + 2)
        first, second = wan.client.get("/v1/videos?limit=2").json()["data"]
        assert first["prompt"] == second["prompt"]
        assert first["seed"] != second["seed"]

        page.fill("prompt", "the sea\n\n the shore")
        assert page.text("#make") == "Make clip"
        page.one("[name=lines]").click()
        page.fill("variations", 2)
        assert page.text("#make") == "Make 4 clips"
        page.one("#make").click()
        page.wait(lambda: len(page.all(".card")) == before + 6)
        newest = wan.client.get("/v1/videos?limit=4").json()["data"]
        assert [video["prompt"] for video in newest] == ["the shore"] * 2 + ["the sea"] * 2
        assert len({video["seed"] for video in newest}) == 4
        page.driver.refresh()
        page.wait_text("#make", "Make 4 clips")
        page.run(
            "const data = new DataTransfer();"
            "data.items.add(new File(['the sea\\nthe shore\\nthe sky'], 'prompts.txt'));"
            "document.body.dispatchEvent("
            "  new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}))"
        )
        page.wait_text("#make", "Make 6 clips")
        page.run(
            "const data = new DataTransfer();"
            "data.setData('text', 'prompt\\tseed\\nthe sky\\t5\\n\\t6\\n');"
            "document.body.dispatchEvent("
            "  new ClipboardEvent('paste', {clipboardData: data, bubbles: true}))"
        )
        page.wait_text("#table-note", "2 rows")
        page.fill("variations", 1)
        page.one("#make-rows").click()
        page.wait(lambda: len(page.all(".card")) == before + 8)
        assert page.all("#table") == []
        second, first = wan.client.get("/v1/videos?limit=2").json()["data"]
        assert (first["prompt"], first["seed"]) == ("the sky", 5)
        assert (second["prompt"], second["seed"]) == ("the sea\nthe shore\nthe sky", 6)


def test_the_fields_that_errors_know_are_those_of_all_forms() -> None:
    forms = [
        _wan(sampling=kind(), image_use="needed", last_image_use="optional").request_model
        for kind in SAMPLING_CLASSES.values()
    ]
    assert {name for form in forms for name in form.model_fields} == FIELDS - {"lora"}


def _wan(**changes: Any) -> Capabilities:
    about: dict[str, Any] = {
        "sampling": WanSampling(),
        "image_use": "refused",
        "prompt_use": "needed",
    }
    return Capabilities(model="wan", sizes=((832, 480),), **{**about, **changes})


def test_an_image_can_be_optional() -> None:
    assert _wan(image_use="optional").request_model(prompt=PROMPT).files == {}
    with pytest.raises(ValidationError, match="input_reference"):
        _wan(image_use="needed").request_model(prompt=PROMPT)


@pytest.mark.parametrize("use", ["needed", "optional", "refused"])
def test_a_last_image_is_taken_as_the_model_takes_it(use: Any) -> None:
    server = _wan(image_use="needed", last_image_use=use)
    first = {"prompt": PROMPT, "input_reference": f"data:image/jpeg;base64,{_BASE64}"}
    both = {**first, "last_image": first["input_reference"]}
    assert server.to_json()["inputs"]["last_image"] == use
    if use == "refused":
        with pytest.raises(ApiError, match="last_image is unknown") as caught:
            server.validate(both)
        assert "these families take one: wan, ltx_condition, " in caught.value.hint
    else:
        assert server.sampling_of(server.validate(both)).has_last_image
    if use == "needed":
        with pytest.raises(ApiError, match="last_image is missing"):
            server.validate(first)
    else:
        assert not server.sampling_of(server.validate(first)).has_last_image


def _h3() -> Capabilities:
    sampling = MiniMaxH3ReferencesSampling()
    return _wan(sampling=sampling, image_use="needed")


def test_references_are_a_list_of_files() -> None:
    server, image = _h3(), f"data:image/jpeg;base64,{_BASE64}"
    first = {"prompt": PROMPT, "input_reference": image}
    for references, count in ((None, 0), (image, 1), ([image, image], 2)):
        request = server.validate({**first, "references": references})
        names = ["input_reference", *(f"reference_{place + 1}" for place in range(count))]
        assert list(request.files) == names
        assert server.sampling_of(request).num_references == count
    about = server.to_json()
    assert (about["inputs"]["references"], about["limits"]["max_references"]) == ("optional", 8)
    with pytest.raises(ApiError, match="references"):
        server.validate({**first, "references": [image] * 9})
    with pytest.raises(ApiError, match="references is unknown") as caught:
        _wan(image_use="needed").validate({**first, "references": image})
    assert caught.value.hint.startswith("these families take references: wan_vace, ")
    body = _request_body(server.request_model)["content"]["application/json"]["schema"]
    assert body["properties"]["references"]["items"]["contentEncoding"] == "base64"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_a_clip_with_references_has_the_bits_of_diffusers(tmp_path: Path) -> None:
    folder = save_tiny("wan_vace", tmp_path / "vace")
    images = [example_images()[index] for index in (0, 1, 2)]
    first, second, third = (image.read_bytes() for image in images)
    form: dict[str, Any] = {"photo": first, "prompt": PROMPT, "seed": 1}
    # diffusers takes at most as many references as the latent has frames. The latent of a clip of
    # 9 frames has 3 frames.
    model = ("--model", str(folder), "--frames", "9")
    with ServerHere(tmp_path / "data", *WAN, *model) as server:
        server.wait_ready()
        references = [("b.jpg", second), ("c.jpg", third)]
        (id,) = server.add(**form, references=references, key="a")
        video = server.wait_for(id, "completed")
        hashes = [hashlib.sha256(data).hexdigest() for data in (second, third)]
        assert video["references"] == [{"sha256": sha256} for sha256 in hashes]
        answer = server.client.get(f"/v1/videos/{id}/input?field=reference_2")
        assert answer.content == third
        other = server.request(**form, references=references[::-1], key="a")
        error_of(other, 422, "invalid_request")
        wrong = server.request(**form, references=[references[0], ("c.jpg", b"x")])
        bad = error_of(wrong, 422, "invalid_image")
        assert bad["details"]["field"] == "references"
        metadata = server.client.get(f"/v1/videos/{id}/metadata").json()
        server.client.post(f"/v1/videos/{id}/verify")
        wait(lambda: server.video(id)["proof"] == "equal", lambda: f"{server.video(id)}")
    assert metadata["references_sha256"] == hashes
    names = ("image", "reference_1", "reference_2")
    source: Any = dict(zip(names, map(_opened, images), strict=True))
    sampling = WanVaceSampling(
        num_inference_steps=4,
        height=32,
        width=32,
        num_frames=9,
        max_sequence_length=8,
        from_image=True,
        num_references=2,
    )
    latents, frames, _ = whole_clip(
        ModelConfig(name=str(folder)), sampling, ClipRequest(seed=1, prompt=PROMPT), source
    )
    expected = (tensor_sha256(latents[-1]), frames_sha256(frames))
    assert (metadata["latents_sha256"], metadata["frames_sha256"]) == expected


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_a_clip_that_ends_at_an_image_has_the_bits_of_diffusers(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "wan", image=True, boundary_ratio=0.9)
    images = [example_images()[index] for index in (0, 1)]
    first, last = (image.read_bytes() for image in images)
    form = {"photo": first, "prompt": PROMPT, "seed": 1}
    with ServerHere(tmp_path / "data", *WAN, "--model", str(folder)) as server:
        server.wait_ready()
        (alone,) = server.add(**form)
        (id,) = server.add(**form, last_image=("b.jpg", last), key="a")
        server.wait_for(alone, "completed")
        video = server.wait_for(id, "completed")
        assert video["last_image"] == {"sha256": hashlib.sha256(last).hexdigest()}
        assert "videos" not in video
        assert "last_image" not in server.video(alone)
        answer = server.client.get(f"/v1/videos/{id}/input?field=last_image")
        assert answer.content == last
        other = server.request(**form, last_image=("b.jpg", first), key="a")
        error_of(other, 422, "invalid_request")
        bad = error_of(server.request(**form, last_image=("b.jpg", b"x")), 422, "invalid_image")
        assert bad["details"]["field"] == "last_image"
        server.client.post(f"/v1/videos/{id}/verify")
        wait(lambda: server.video(id)["proof"] == "equal", lambda: f"{server.video(id)}")
        metadata = server.client.get(f"/v1/videos/{id}/metadata").json()
        before = server.client.get(f"/v1/videos/{alone}/metadata").json()
        _delete_clips(server, alone, id)
    sampling = replace(SAMPLING, from_image=True, has_last_image=True)
    source: Any = dict(zip(("image", "last_image"), map(_opened, images), strict=True))
    latents, frames, _ = whole_clip(
        ModelConfig(name=str(folder)), sampling, ClipRequest(seed=1, prompt=PROMPT), source
    )
    expected = (tensor_sha256(latents[-1]), frames_sha256(frames))
    assert (metadata["latents_sha256"], metadata["frames_sha256"]) == expected
    assert before["latents_sha256"] != expected[0]


def _opened(path: Path) -> Image.Image:
    return read_image(path)[0]


def test_seconds_become_a_number_of_frames_that_the_family_makes() -> None:
    own = _wan(sampling=WanSampling(num_frames=81))
    for seconds, frames in ((0.01, 1), (1, 17), (1.25, 21), (5, 81)):
        request = own.request_model(prompt=PROMPT, seconds=seconds)
        assert own.sampling_of(request).num_frames == frames


def test_a_server_has_limits_of_its_own_for_steps_and_frames() -> None:
    sampling = WanSampling(num_frames=21, num_inference_steps=8)
    own = _wan(sampling=sampling, max_steps=8, max_frames=33)
    about = own.to_json()
    assert [about["fields"][name]["maximum"] for name in ("steps", "frames")] == [8, 33]
    assert [about["limits"][name] for name in ("max_steps", "max_frames")] == [8, 33]
    own.sampling_of(own.request_model(prompt=PROMPT, steps=8, frames=33))
    for beyond in ({"steps": 9}, {"num_frames": 37}):
        with pytest.raises(ValidationError, match="less than or equal to"):
            own.request_model(prompt=PROMPT, **beyond)
    with pytest.raises(ApiError, match="81 frames, and this server makes 33 at most"):
        own.sampling_of(own.request_model(prompt=PROMPT, seconds=5))
