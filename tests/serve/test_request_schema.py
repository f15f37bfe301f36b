"""Validation of requests without a server: formats that clients send, and error messages."""

from __future__ import annotations

import textwrap
from base64 import b64encode
from typing import Any

import pytest
from starlette.datastructures import FormData

from svdpp.config import WanSampling
from svdpp.errors import RequestError
from svdpp.media.inputs import example_images
from svdpp.serve.request_schema import Capabilities, parse_json, without_repetition
from svdpp.serve.schemas import ApiError, params_to_json, to_api_error

PHOTO = example_images()[0].read_bytes()
BASE64 = b64encode(PHOTO).decode()
URL = f"data:image/jpeg;base64,{BASE64}"

WAN = Capabilities(
    model="wan",
    sampling=WanSampling(num_frames=81, height=480, width=832),
    sizes=((832, 480), (480, 832)),
    image_use="optional",
    prompt_use="needed",
)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(Exception) as refused:  # noqa: PT011  # RequestError, too
        WAN.sampling_of(WAN.validate({"prompt": "the sea", **fields}))
    return to_api_error(refused.value)  # type: ignore[arg-type]


def test_what_clients_of_vllm_omni_send_is_refused_with_the_nearest_value() -> None:
    error = refusal(num_frames="80")
    assert (error.status, error.hint) == (422, "use frames 77 or frames 81")
    error = refusal(width="854", height="480")
    assert (error.status, error.code, error.hint) == (422, "wrong_size", "use 832x480")
    for name, words in (
        ("extra_params", "a field of its own"),
        ("lora", "offers no LoRAs"),
        ("attention_backend", "one attention backend"),
        ("video_reference", "input_reference"),
        ("boundary_ratio", "the checkpoint"),
        ("num_inference_step", "did you mean"),
    ):
        error = refusal(**{name: '{"a": 1}'})
        assert (error.status, error.details["faults"][0]["field"]) == (422, name)
        assert words in error.hint


def test_a_hint_keeps_the_proposals_that_a_client_can_follow() -> None:
    hint = "use `num_frames` 5, or use `world_size` 2, or use a smaller `height`; use --memory-opt"
    error = to_api_error(RequestError("too large", hint))
    assert error.hint == "use frames 5, or use a smaller height"
    assert to_api_error(RequestError("too large", "use `world_size` 2")).hint == ""


def test_frames_per_second_may_be_a_fraction() -> None:
    def sampling(**fields: Any) -> Any:
        return WAN.sampling_of(WAN.validate({"prompt": "the sea", **fields}))

    assert repr(sampling(fps="24").fps) == repr(sampling(fps=24.0).fps) == "24"
    film = sampling(fps="23.976", seconds="2")
    assert (film.fps, film.frames) == (23.976, 49)
    assert params_to_json(film)["seconds"] == "2.04"
    assert WAN.to_json()["fields"]["fps"]["type"] == "number"
    assert refusal(fps="24", seconds="1000").message.startswith("1000 s at 24 fps are")
    assert refusal(fps="0.5").details["faults"][0]["field"] == "fps"


def test_a_user_is_ignored() -> None:
    sampling = WAN.sampling_of(WAN.validate({"prompt": "the sea", "user": "ann"}))
    assert sampling == WAN.sampling_of(WAN.validate({"prompt": "the sea"}))
    assert "user" not in WAN.to_json()["fields"]


@pytest.mark.parametrize(
    "image",
    [
        {"image_url": {"url": URL}},
        f'{{"image_url": {{"url": "{URL}"}}}}',
        "\n".join(textwrap.wrap(BASE64, 76)) + "\n",
        f"data:image/jpeg;base64,{textwrap.fill(BASE64, 76)}",
        PHOTO.decode("latin-1"),  # form field without `filename`, which is decoded as text
    ],
    ids=["object", "text of an object", "wrapped", "wrapped data URL", "no filename"],
)
def test_an_image_is_understood_as_people_send_it(image: Any) -> None:
    request = WAN.validate({"prompt": "the sea", "input_reference": image})
    assert request.files["input_reference"].file.read() == PHOTO


@pytest.mark.parametrize("image", [{"file_id": "x"}, 7, ["a"], "a 夜 text", {"image_url": 7}])
def test_what_is_no_image_is_told_in_words(image: Any) -> None:
    error = refusal(input_reference=image)
    assert {fault["field"] for fault in error.details["faults"]} == {"input_reference"}
    assert "UploadFile" not in error.message
    assert "send a file" in error.message


@pytest.mark.parametrize("name", ["seed", "steps", "seconds", "priority", "guidance_scale", "fps"])
def test_true_is_no_number(name: str) -> None:
    error = refusal(**{name: True})
    assert error.message == f"{name} is refused: it must be a number, got true"


@pytest.mark.parametrize("name", ["seed", "steps", "seconds", "guidance_scale", "fps"])
def test_null_stands_for_the_default(name: str) -> None:
    default = WAN.sampling_of(WAN.validate({"prompt": "the sea"}))
    assert WAN.sampling_of(WAN.validate({"prompt": "the sea", name: None})) == default
    assert refusal(**{name: -1}).details["faults"][0]["field"] == name


def test_a_field_that_is_sent_twice_is_refused() -> None:
    with pytest.raises(ApiError, match="'seed' is sent 2 times") as refused:
        without_repetition(FormData([("seed", "1"), ("steps", "4"), ("seed", "2")]).multi_items())
    assert refused.value.details == {"field": "seed", "times": 2}
    with pytest.raises(ApiError, match="'seed' is sent 3 times") as refused:
        parse_json(b'{"seed": 1, "steps": 4, "seed": 2, "seed": 1}')
    assert (refused.value.status, refused.value.code) == (422, "repeated_field")
    with pytest.raises(ApiError, match="'url' is sent 2 times"):
        parse_json(b'{"input_reference": {"image_url": {"url": "data:,", "url": ""}}}')
    body = b'{"seed": 1, "prompt": "\xe5\xa4\x9c", "steps": [{"seed": 1}, {"seed": 2}]}'
    assert parse_json(body) == {"seed": 1, "prompt": "夜", "steps": [{"seed": 1}, {"seed": 2}]}
    assert without_repetition(FormData([("seed", "1"), ("steps", "4")]).multi_items()) == {
        "seed": "1",
        "steps": "4",
    }
