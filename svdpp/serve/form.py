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

from svdpp.config import SAMPLING_CLASSES, Param, PromptedSampling, params_of
from svdpp.config.limits import MAX_FRAMES, MAX_PROMPT_CHARACTERS, MAX_SEED, MAX_STEPS
from svdpp.models.checkpoint import Use

MAX_PRIORITY = 9

Fit = Literal["stretch", "crop", "pad"]

_SIZE = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$"
#: Parameters that requests name in another way, or not at all.
_NOT_IN_FORMS = ("height", "width", "decode_chunk_size")

#: Other names of fields: those of a photograph that is text, which are vLLM-Omni's and what
#: OpenAI's client makes of `{"image_url": ...}`; then those of diffusers, which vLLM-Omni's clients
#: send.
_SYNONYMS: Mapping[str, str] = {
    "image_reference": "input_reference",
    "input_reference[image_url]": "input_reference",
    **{p.name: p.api for p in params_of(PromptedSampling).values() if p.api},
}


def params_by_field(kind: Any) -> dict[str, Param]:
    """The parameters of a sampling class that requests have, by their names in requests."""
    params = params_of(kind)
    return {param.field: param for name, param in params.items() if name not in _NOT_IN_FORMS}


def _photo_of(value: Any) -> Any:
    """The photograph as a file, also if it is text: base64, a data URL, or one as `image_url`."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = from_json(value)
    if isinstance(value, dict) and value.keys() == {"image_url"}:
        value = value["image_url"]
    if not isinstance(value, str):
        return value
    if "://" in value[:20]:
        raise ValueError("no URLs are fetched: send the image itself, or a data URL of it")
    head, is_url, text = value.partition(",")
    if is_url and not (head.startswith("data:") and head.endswith(";base64")):
        raise ValueError("a data URL must be in base64")
    content = base64.b64decode(text if is_url else value, validate=True)
    return UploadFile(io.BytesIO(content), size=len(content))


_NUMBERS = (int, int | None, float | None)
_PhotoFile = Annotated[UploadFile, BeforeValidator(_photo_of)]


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
        named = {name: value for name, value in given.items() if value != ""}
        if ("width" in named) != ("height" in named):
            raise ValueError("width and height belong together")
        if "width" in named:
            named["width x height"] = f"{named.pop('width')}x{named.pop('height')}"
        for theirs, ours in (*_SYNONYMS.items(), ("width x height", "size")):
            if theirs in named and ours in cls.model_fields:
                if ours in named:
                    raise ValueError(f"{theirs} and {ours} are the same, give one")
                named[ours] = named.pop(theirs)
        return named

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
    size: Annotated[
        str | None,
        Field(pattern=_SIZE, description="Width x height, one of `sizes` in `/v1/models`."),
    ] = None
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


def _photo_fields(use: Use, *, videos: bool = False) -> dict[str, Any]:
    text = "The image: PNG, JPEG, WebP, BMP, TIFF or GIF"
    text = "The video: MP4, MOV, WebM or Matroska; an image stands still" if videos else text
    fit = Field(None, description="How an image of another shape becomes the frame.")
    match use:
        case "refused":
            return {}
        case "needed":
            photo: Any = (_PhotoFile, Field(description=f"{text}."))
        case _:
            text += "; without it the clip is made from text alone."
            photo = (_PhotoFile | None, Field(None, description=text))
    return {"input_reference": photo, "fit": (Fit | None, fit)}


def _prompt_fields(kind: type[Any]) -> dict[str, Any]:
    if not issubclass(kind, PromptedSampling):
        empty = "Must be empty: Stable Video Diffusion takes no text."
        return {"prompt": (str | None, Field(None, max_length=10_000, description=empty))}
    length = MAX_PROMPT_CHARACTERS
    negative = Field(None, max_length=length, description="What must not be in the clip.")
    return {
        "prompt": (str, Field(max_length=length, description="What happens in the clip.")),
        "negative_prompt": (str | None, negative),
    }


def _param_field(param: Param, highest: float) -> Any:
    lowest: dict[str, Any] = {"gt" if param.above else "ge": param.lowest}
    default = f" By default {param.shown_default}." if param.shown_default else ""
    text = f"{param.help}{default}"
    return (param.kind | None, Field(None, **lowest, le=highest, description=text))


PHOTO_FIELDS = frozenset(_photo_fields("needed"))
#: The fields of all servers' forms.
ALL_FIELDS = (
    frozenset(VideoRequest.model_fields)
    | PHOTO_FIELDS
    | {"prompt", "negative_prompt"}
    | {field for kind in SAMPLING_CLASSES.values() for field in params_by_field(kind)}
)


def form_of(
    family: str, photo: Use, *, max_steps: int = MAX_STEPS, max_frames: int = MAX_FRAMES
) -> type[VideoRequest]:
    """The form of a server's requests, by the family of its model and its use of photographs."""
    kind = SAMPLING_CLASSES[family]
    highest = {"steps": max_steps, "frames": max_frames}
    return create_model(
        "VideoRequest",
        __base__=VideoRequest,
        __doc__=VideoRequest.__doc__,
        **_photo_fields(photo, videos=kind.from_video),
        **_prompt_fields(kind),
        **{
            field: _param_field(param, highest.get(field, param.highest))
            for field, param in params_by_field(kind).items()
        },
    )
