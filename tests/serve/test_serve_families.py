"""The service for models that take prompts: Wan from text, LTX-Video from photographs and text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from svdpp.config import SAMPLING_CLASSES, ClipRequest, ModelConfig, PipelineConfig, WanSampling
from svdpp.driver.resolve import resolve
from svdpp.errors import RequestError
from svdpp.media.video import frames_sha256
from svdpp.serve.clips import Admission
from svdpp.serve.form import Capabilities
from svdpp.serve.queue import JobQueue
from svdpp.serve.views import FIELDS, ApiError
from svdpp.worker.tensor_files import tensor_sha256
from tests.cli.shell import assert_error, svdpp_here
from tests.models.builders import save_tiny_lora
from tests.models.range_checks import latents_and_frames
from tests.models.tiny_families import save_tiny_ltx, save_tiny_wan
from tests.serve.http_server import PHOTO, HttpServer, error_of, schema_of_form, wait
from tests.serve.store_jobs import new_job
from tests.serve.test_page import driver, opened

__all__ = ["driver"]  # a fixture

CPU = ("--device", "cpu", "--world", "2", "--threads", "1", "--max-prompt-tokens", "8")
WAN = (*CPU, "--steps", "4", "--height", "32", "--width", "32", "--frames", "5")
LTX = (*CPU, "--steps", "4", "--height", "64", "--width", "96", "--frames", "9")
PROMPT = "the sea at night"
SAMPLING = WanSampling(
    num_inference_steps=4, height=32, width=32, num_frames=5, max_sequence_length=8
)


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan with two experts, from text."""
    return save_tiny_wan(tmp_path_factory.mktemp("wan"), boundary_ratio=0.875)


@pytest.fixture(scope="module")
def wan(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server over the folder of an earlier one, which ran Stable Video Diffusion."""
    folder = tmp_path_factory.mktemp("data")
    store = JobQueue(folder)
    store.add(new_job(id=f"video_{0:032x}", model="svd"), max_open=None)
    store.close()
    with HttpServer(folder, *WAN, "--model", str(wan_folder)) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def ltx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server for clips from photographs, and from text alone."""
    folder = save_tiny_ltx(tmp_path_factory.mktemp("ltx"))
    data = tmp_path_factory.mktemp("data")
    with HttpServer(data, *LTX, "--model", str(folder)) as server:
        server.wait_ready()
        yield server


def made(server: HttpServer, **form: Any) -> dict[str, Any]:
    """A finished clip, with the verdict of its proof."""
    answer = server.request(**form)
    assert answer.status_code == 202, answer.text
    id = answer.json()["id"]
    server.wait_for(id, "completed")
    server.client.post(f"/v1/videos/{id}/verify")
    wait(lambda: server.video(id)["proof"] != "running", lambda: server.err)
    return server.video(id)


# --- the server -----------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.usefixtures("one_thread")
def test_a_clip_from_text_has_the_bits_of_diffusers(wan: HttpServer, wan_folder: Path) -> None:
    prompts = {"prompt": PROMPT, "negative_prompt": "blurred"}
    (id,) = wan.add(photo=None, **prompts, guidance_scale_2=3, seed=1)
    video = wan.wait_for(id, "completed")

    assert {**prompts, "guidance_scale_2": 3.0, "input": None}.items() <= video.items()
    metadata = wan.client.get(f"/v1/videos/{id}/metadata").json()
    sampling = replace(SAMPLING, guidance_scale_2=3.0)
    latents, frames = latents_and_frames(
        ModelConfig(name=str(wan_folder)), sampling, ClipRequest(seed=1, **prompts), None
    )
    expected = (tensor_sha256(latents[-1]), frames_sha256(frames))
    assert (metadata["latents_sha256"], metadata["frames_sha256"]) == expected
    assert (metadata["prompt"], metadata["split"]) == (PROMPT, "balanced")
    assert wan.client.get(f"/v1/videos/{id}/content").content[4:8] == b"ftyp"
    error_of(wan.client.get(f"/v1/videos/{id}/input"), 404, "no_input")
    assert list((wan.folder / "photos").iterdir()) == []
    assert PROMPT not in wan.err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "code", "words"),
    [
        ({"prompt": ""}, "invalid_request", "prompt is missing"),
        ({"prompt": "x" * 20_001}, "invalid_request", "prompt"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "invalid_request", "has no effect"),
        ({"photo": PHOTO}, "invalid_request", "input_reference is unknown"),
        ({"decode_timestep": 0.1}, "invalid_request", "decode_timestep is unknown"),
        ({"frames": 6}, "invalid_request", "frames must be a multiple of 4 plus 1"),
        ({"flow_shift": 100}, "invalid_request", "expert"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_at_once(
    wan: HttpServer, form: dict[str, Any], code: str, words: str
) -> None:
    error = error_of(wan.request(**{"photo": None, "prompt": PROMPT, **form}), 422, code)
    assert words in error["message"]
    assert "--" not in error["message"]


@pytest.mark.processes
def test_the_model_says_what_its_form_has(wan: HttpServer) -> None:
    (model,) = wan.client.get("/v1/models").json()["data"]

    inputs = {"input_reference": "refused", "prompt": "needed", "negative_prompt": "optional"}
    assert (model["family"], model["inputs"]) == ("wan", inputs)
    assert {"guidance_scale", "guidance_scale_2", "flow_shift"} <= set(model["fields"])
    assert not {"motion_bucket_id", "fit"} & {*model["fields"], *model["defaults"]}
    assert model["limits"]["frames_unit"] == 4
    form = schema_of_form(wan)
    assert form["required"] == ["prompt"]
    assert "input_reference" not in form["properties"]


@pytest.mark.processes
def test_clips_of_a_model_that_the_server_ran_earlier(wan: HttpServer) -> None:
    old = wan.video(f"video_{0:032x}")

    assert (old["status"], old["motion_bucket_id"]) == ("queued", 127)
    assert old["held"].startswith("its model is svd, and this server runs ")
    listed = wan.client.get("/v1/videos?limit=100").json()["data"]
    assert [video for video in listed if video["id"] == old["id"]] == [old]


@pytest.mark.processes
@pytest.mark.long
def test_clips_are_made_from_photographs_and_from_text(ltx: HttpServer) -> None:
    (of_photo,) = ltx.add(prompt=PROMPT, seed=1)
    of_text = made(ltx, photo=None, prompt=PROMPT, guidance_rescale=0.5, seed=1)

    assert (of_text["proof"], of_text["input"]) == ("equal", None), ltx.err
    assert ltx.wait_for(of_photo, "completed")["input"]["name"] == "sea.jpg"
    error = error_of(ltx.request(prompt=PROMPT, guidance_scale_2=1), 422, "invalid_request")
    assert "guidance_scale_2 is unknown" in error["message"]


#: As in docs/lora.md.
FOUR_STEPS = ("--world", "4", "--steps", "4", "--guidance-scale", "1", "--param", "flow_shift=5")


@pytest.mark.processes
@pytest.mark.long
def test_clips_with_loras_are_proven(tmp_path: Path) -> None:
    """A LoRA for each expert, no guidance, and four ranks of one step each."""
    folder = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875)
    high = save_tiny_lora(folder, tmp_path / "high.safetensors", seed=1)
    low = save_tiny_lora(folder, tmp_path / "low.safetensors", part="transformer_2", seed=2)
    loras = ("--lora", f"{high}:high", "--lora", f"{low}:low")
    with HttpServer(tmp_path / "data", *WAN, "--model", str(folder), *FOUR_STEPS, *loras) as server:
        server.wait_ready()
        video = made(server, photo=None, prompt="the sea", seed=7)
        assert video["proof"] == "equal", video
        metadata = server.client.get(f"/v1/videos/{video['id']}/metadata").json()
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (high, low)]
    assert [each["sha256"] for each in metadata["lora"]] == hashes


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.long
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


# --- its parts ------------------------------------------------------------------------------------


def test_sizes_that_the_model_cannot_make_are_refused_at_the_start(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "model", expand_timesteps=True)
    options = ("--model", str(folder), "--device", "cpu", "--world", "1", "--frames", "5")
    sizes = ("--height", "64", "--width", "64", "--sizes", "48x64")
    answer = svdpp_here("serve", *options, *sizes, "--port", "0", "--data", str(tmp_path / "data"))
    assert_error(answer, 2, "--width must be a multiple of 32", "got 48")


def test_the_fields_that_errors_know_are_those_of_all_forms() -> None:
    servers = [
        Capabilities(model="m", sampling=kind(), sizes=()) for kind in SAMPLING_CLASSES.values()
    ]
    forms = [server.form for server in servers]
    assert {name for form in forms for name in form.model_fields} == FIELDS


def test_seconds_become_a_number_of_frames_that_the_family_makes() -> None:
    own = Capabilities(
        model="wan",
        sampling=WanSampling(num_frames=81),
        sizes=((832, 480),),
        photo="refused",
        prompt="needed",
    )
    for seconds, frames in ((0.01, 1), (1, 17), (1.25, 21), (5, 81)):
        request = own.form(prompt=PROMPT, seconds=seconds)
        assert own.sampling_of(request).num_frames == frames


def test_a_server_has_limits_of_its_own_for_steps_and_frames() -> None:
    own = Capabilities(
        model="wan",
        sampling=WanSampling(num_frames=21, num_inference_steps=8),
        sizes=((832, 480),),
        photo="refused",
        prompt="needed",
        max_steps=8,
        max_frames=33,
    )
    about = own.to_json()
    assert [about["fields"][name]["maximum"] for name in ("steps", "frames")] == [8, 33]
    assert [about["limits"][name] for name in ("max_steps", "max_frames")] == [8, 33]
    own.sampling_of(own.form(prompt=PROMPT, steps=8, frames=33))
    for beyond in ({"steps": 9}, {"num_frames": 37}):
        with pytest.raises(ValidationError, match="less than or equal to"):
            own.form(prompt=PROMPT, **beyond)
    with pytest.raises(ApiError, match="81 frames, and this server makes 33 at most"):
        own.sampling_of(own.form(prompt=PROMPT, seconds=5))


def test_the_gate_knows_which_rank_has_which_expert(wan_folder: Path) -> None:
    config, checkpoint = resolve(
        PipelineConfig(
            world_size=2,
            model=ModelConfig(name=str(wan_folder)),
            sampling=replace(SAMPLING, num_inference_steps=50),
            split="balanced",
        )
    )
    gate = Admission(config, checkpoint)
    assert config.expert_boundary == 16
    for steps in (4, 7, 16, 50, 400):
        gate.check(replace(config.sampling, num_inference_steps=steps))
    with pytest.raises(RequestError, match="would do all 1 steps"):
        gate.check(replace(config.sampling, num_inference_steps=1))
