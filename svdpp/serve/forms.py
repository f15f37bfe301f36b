"""What a request says: the fields that a server takes, by the family of its model.

A server's form has only its own model's fields, so that its OpenAPI document says what it takes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from fastapi import UploadFile
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError, from_json

from svdpp.config import SAMPLING_CLASSES, own_params
from svdpp.config.limits import (
    MAX_FPS,
    MAX_FRAMES,
    MAX_GUIDANCE_SCALE,
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPT_TOKENS,
    MAX_STEPS,
)
from svdpp.models.checkpoint import Use

#: The largest seed: torch.Generator.manual_seed takes 64 bits, and svdpp only those from 0.
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 9

Fit = Literal["stretch", "crop", "pad"]

_SIZE = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$"

#: The API's names of parameters that have other names in `svdpp.config`.
API_NAMES: Mapping[str, str] = {
    "num_inference_steps": "steps",
    "num_frames": "frames",
    "max_sequence_length": "max_prompt_tokens",
}

#: Other names of fields: those of diffusers, which vLLM-Omni's clients send, and those of a
#: photograph that is text: vLLM-Omni's, and what OpenAI's client makes of `{"image_url": ...}`.
_SYNONYMS: Mapping[str, str] = {
    **API_NAMES,
    "image_reference": "input_reference",
    "input_reference[image_url]": "input_reference",
}


def _photo_of(value: Any) -> Any:
    """The photograph as a file, also if it is text: base64, a data URL, or one as `image_url`."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = from_json(value)
    if isinstance(value, dict) and value.keys() == {"image_url"}:
        value = value["image_url"]
    if not isinstance(value, str):
        return value
    if "://" in value[:20]:
        raise ValueError("no URLs are fetched: send the photograph itself, or a data URL of it")
    head, is_url, text = value.partition(",")
    if is_url and not (head.startswith("data:") and head.endswith(";base64")):
        raise ValueError("a data URL must be in base64")
    content = base64.b64decode(text if is_url else value, validate=True)
    return UploadFile(io.BytesIO(content), size=len(content))


_NUMBERS = (int, int | None, float | None)
_PhotoFile = Annotated[UploadFile, BeforeValidator(_photo_of)]
_Guidance = Annotated[float | None, Field(ge=0, le=MAX_GUIDANCE_SCALE)]
_Fit = Annotated[
    Fit | None, Field(description="How a photograph of another shape becomes the frame.")
]


class VideoRequest(BaseModel):
    """The body of `POST /v1/videos`. What is left out has the model's default.

    Also taken: `num_frames`, `num_inference_steps`, `max_sequence_length`, `image_reference`, and
    `width` with `height`, as vLLM-Omni's clients send them.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, given: Any) -> Any:
        """The fields by the names of this API; an empty one is left out, as in a browser's form."""
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if value != ""}
        if ("width" in found) != ("height" in found):
            raise ValueError("width and height belong together")
        if "width" in found:
            found["width x height"] = f"{found.pop('width')}x{found.pop('height')}"
        for theirs, ours in (*_SYNONYMS.items(), ("width x height", "size")):
            if theirs in found and ours in cls.model_fields:
                if ours in found:
                    raise ValueError(f"{theirs} and {ours} are the same, give one")
                found[ours] = found.pop(theirs)
        return found

    model: Annotated[
        str | None, Field(description="The id in `/v1/models`; by default that model.")
    ] = None
    seed: Annotated[
        int | None, Field(ge=0, le=MAX_SEED, description="Of the noise; by default drawn.")
    ] = None
    seconds: Annotated[
        float | None,
        Field(gt=0, le=MAX_FRAMES, description="Length of the clip, instead of `frames`."),
    ] = None
    frames: int | None = None  # see `form_of`
    size: Annotated[
        str | None,
        Field(pattern=_SIZE, description="Width x height, one of `sizes` in `/v1/models`."),
    ] = None
    steps: int | None = None
    fps: Annotated[int | None, Field(ge=1, le=MAX_FPS, description="Frames per second.")] = None
    priority: Annotated[
        int, Field(ge=0, le=MAX_PRIORITY, description="Higher ones are taken earlier.")
    ] = 0

    @field_validator("*", mode="before")
    @classmethod
    def _plain_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses what Python also takes for a number, but no other language: `1_000`, `true`."""
        is_number = cls.model_fields[info.field_name or ""].annotation in _NUMBERS
        if is_number and (isinstance(value, bool) or (isinstance(value, str) and "_" in value)):
            raise PydanticKnownError("int_parsing")
        return value

    def value(self, name: str) -> Any:
        """The value of a field; None if it is not given, or not in this family's form."""
        return getattr(self, name, None)

    @property
    def photo(self) -> UploadFile | None:
        """The photograph, if the form has one."""
        return cast("UploadFile | None", self.value("input_reference"))


class _Photo(VideoRequest):
    """The fields of a server whose clips all start from a photograph."""

    input_reference: Annotated[
        _PhotoFile, Field(description="The photograph: PNG, JPEG, WebP, BMP, TIFF or GIF.")
    ]
    fit: _Fit = None


class _OptionalPhoto(VideoRequest):
    """The fields of a server whose clips start from a photograph, or from text alone."""

    input_reference: Annotated[
        _PhotoFile | None,
        Field(
            description="The photograph: PNG, JPEG, WebP, BMP, TIFF or GIF; without it the clip "
            "is made from text alone."
        ),
    ] = None
    fit: _Fit = None


class _NoPhoto(VideoRequest):
    """A server that makes clips from text alone has no such fields."""


class _Svd(VideoRequest):
    prompt: Annotated[
        str | None,
        Field(
            description="Must be empty: Stable Video Diffusion takes no text.", max_length=10_000
        ),
    ] = None


class _Prompted(VideoRequest):
    prompt: Annotated[
        str, Field(max_length=MAX_PROMPT_CHARACTERS, description="What happens in the clip.")
    ]
    negative_prompt: Annotated[
        str | None,
        Field(max_length=MAX_PROMPT_CHARACTERS, description="What must not be in the clip."),
    ] = None
    guidance_scale: Annotated[
        _Guidance,
        Field(description="Guidance by the prompt; 1 or less turns it off."),
    ] = None
    max_prompt_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_PROMPT_TOKENS,
            description="Tokens of a prompt that the model reads; the rest is cut off.",
        ),
    ] = None


_FAMILIES: Mapping[str, type[VideoRequest]] = {"svd": _Svd}
_PHOTOS: Mapping[Use, type[VideoRequest]] = {
    "needed": _Photo,
    "optional": _OptionalPhoto,
    "refused": _NoPhoto,
}

PHOTO_FIELDS = frozenset(_Photo.model_fields.keys() - VideoRequest.model_fields.keys())
#: The fields of all servers' forms.
ALL_FIELDS = frozenset(
    name for form in (*_FAMILIES.values(), *_PHOTOS.values()) for name in form.model_fields
) | frozenset(name for kind in SAMPLING_CLASSES.values() for name in own_params(kind))


def form_of(
    family: str, photo: Use, *, max_steps: int = MAX_STEPS, max_frames: int = MAX_FRAMES
) -> type[VideoRequest]:
    """The form of a server's requests, by the family of its model and its use of photographs."""
    own: dict[str, Any] = {
        name: (
            param.kind | None,
            Field(
                None,
                ge=None if param.above else param.lowest,
                gt=param.lowest if param.above else None,
                le=param.highest,
                description=param.help,
            ),
        )
        for name, param in own_params(SAMPLING_CLASSES[family]).items()
    }
    steps = Annotated[int | None, Field(ge=1, le=max_steps, description="Denoising steps.")]
    return create_model(
        "VideoRequest",
        __base__=(_PHOTOS[photo], _FAMILIES.get(family, _Prompted)),
        __doc__=VideoRequest.__doc__,
        steps=(steps, None),
        frames=(Annotated[int | None, Field(ge=1, le=max_frames)], None),
        **own,
    )
