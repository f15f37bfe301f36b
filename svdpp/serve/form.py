"""What clients may request: the form of the server's model, and the parameters that it becomes.

A server's form has only its own model's fields, so that its OpenAPI document says what it takes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, LiteralString, Self

from fastapi import UploadFile
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError, from_json

from svdpp.config import SAMPLING_CLASSES, Param, PromptedSampling, SamplingConfig, params_of
from svdpp.config.limits import MAX_FRAMES, MAX_PROMPT_CHARACTERS, MAX_SEED, MAX_STEPS
from svdpp.models.checkpoint import Checkpoint, Use
from svdpp.serve.api_errors import ApiError, in_words, invalid_request
from svdpp.serve.views import (
    FIELDS,
    IMAGE_FIELD,
    Fit,
    FormField,
    Model,
    params_by_field,
    params_view,
    size_of,
)

MAX_PRIORITY = 9
MAX_URL_CHARACTERS = 2000

_SIZE = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$"
_SIDES = "width x height"

#: Other names of fields: those of an image that is text, which are vLLM-Omni's and what
#: OpenAI's client makes of `{"image_url": ...}`; then those of diffusers, which vLLM-Omni's clients
#: send.
_SYNONYMS: Mapping[str, str] = {
    "image_reference": "input_reference",
    "input_reference[image_url]": "input_reference",
    **{p.name: p.api for p in params_of(PromptedSampling).values() if p.api},
    _SIDES: "size",
}


def _photo_of(value: Any) -> Any:
    """The image as a file, also if it is text: base64, a data URL, or one as `image_url`."""
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


def _fault(field: str, kind: LiteralString | PydanticCustomError) -> ValidationError:
    """What a validator of the whole form raises about one field."""
    fault = InitErrorDetails(type=kind, loc=(field,), input=None)
    return ValidationError.from_exception_data("VideoRequest", [fault])


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
        sides = named.keys() & {"width", "height"}
        if len(sides) == 1:
            raise _fault(({"width", "height"} - sides).pop(), "missing")
        if sides:
            named[_SIDES] = f"{named.pop('width')}x{named.pop('height')}"
        for theirs, ours in _SYNONYMS.items():
            if theirs in named and ours in cls.model_fields:
                if ours in named:
                    same = PydanticCustomError("value_error", f"it is the same as {ours}, give one")
                    raise _fault(theirs, same)
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
    callback_url: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[!-~]+$",
            max_length=MAX_URL_CHARACTERS,
            description="Where a webhook goes when the clip is completed or failed; one of the "
            "hosts that the server allows.",
        ),
    ] = None

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
    def files(self) -> dict[str, UploadFile]:
        """The files of the form, by field."""
        return {name: value for name, value in self if hasattr(value, "filename")}


_VIDEO = "MP4, MOV, WebM or Matroska; an image stands still"


def _photo_fields(use: Use, *, videos: bool = False) -> dict[str, Any]:
    text = "The image: PNG, JPEG, WebP, BMP, TIFF or GIF"
    text = f"The video: {_VIDEO}" if videos else text
    fit = Field(None, description="How an image of another shape becomes the frame.")
    match use:
        case "refused":
            return {}
        case "needed":
            photo: Any = (_PhotoFile, Field(description=f"{text}."))
        case _:
            text += "; without it the clip is made from text alone."
            photo = (_PhotoFile | None, Field(None, description=text))
    return {IMAGE_FIELD: photo, "fit": (Fit | None, fit)}


def _video_field(name: str) -> Any:
    return (_PhotoFile, Field(description=f"The {name.replace('_', ' ')}: {_VIDEO}."))


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


def form_of(
    family: str, photo: Use, *, max_steps: int = MAX_STEPS, max_frames: int = MAX_FRAMES
) -> type[VideoRequest]:
    """The form of a server's requests, by the family of its model and its use of images."""
    kind = SAMPLING_CLASSES[family]
    highest = {"steps": max_steps, "frames": max_frames}
    return create_model(
        "VideoRequest",
        __base__=VideoRequest,
        __doc__=VideoRequest.__doc__,
        **_photo_fields(photo, videos=kind.from_video),
        **{name: _video_field(name) for name in kind.videos},
        **_prompt_fields(kind),
        **{
            field: _param_field(param, highest.get(field, param.highest))
            for field, param in params_by_field(kind).items()
        },
    )


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What clients may request.

    Args:
        model: its id.
        sampling: the defaults, resolved.
        sizes: width and height of the frames that clients may choose.
        weights: fingerprint or commit of the model's weights; empty if they never change.
        photo: whether an image is `needed`, `optional` or `refused`.
        prompt: the same; a negative prompt is optional wherever there is a prompt.
        unused: sampling parameters of the family that have no effect on the model.
        max_steps: of a clip.
        max_frames: of a clip.
    """

    model: str
    sampling: SamplingConfig
    sizes: tuple[tuple[int, int], ...]
    weights: str = ""
    photo: Use = "needed"
    prompt: Use = "refused"
    unused: tuple[str, ...] = ()
    max_steps: int = MAX_STEPS
    max_frames: int = MAX_FRAMES

    @classmethod
    def of(cls, model: str, checkpoint: Checkpoint | None, **settings: Any) -> Self:
        """Those of a checkpoint; None: the dummy model, which takes the place of SVD."""
        if checkpoint is None:
            return cls(model=model, **settings)
        weights = ""
        if checkpoint.fingerprint is not None:
            model, weights = checkpoint.folder.name, checkpoint.fingerprint  # not where it is
        elif checkpoint.revision is not None:
            weights = ".".join(filter(None, (checkpoint.revision, checkpoint.variant)))
        loras = (file.identity for file in checkpoint.loras)
        return cls(
            model=model,
            weights=".".join(filter(None, (weights, *loras))),
            photo=checkpoint.image_use,
            prompt=checkpoint.prompt_use,
            unused=checkpoint.unused_parameters,
            **settings,
        )

    @property
    def kind(self) -> str:
        """As that of the jobs that are made by its model; see `Job.kind`."""
        return self.weights or self.model

    @cached_property
    def form(self) -> type[VideoRequest]:
        """The form of a request."""
        limits = {"max_steps": self.max_steps, "max_frames": self.max_frames}
        return form_of(self.sampling.family, self.photo, **limits)

    def to_json(self, **limits: Any) -> Model:
        """The model as `/v1/models` lists it."""
        inputs: dict[str, Use] = {
            IMAGE_FIELD: self.photo,
            "prompt": self.prompt,
            "negative_prompt": "refused" if self.prompt == "refused" else "optional",
            **dict.fromkeys(self.sampling.videos, "needed"),
        }
        left_out = {"model", *inputs, *self.unused}
        schemas = self.form.model_json_schema()["properties"]
        fields = {name: _field(each) for name, each in schemas.items() if name not in left_out}
        defaults = params_view(self.sampling)
        return Model(
            id=self.model,
            family=self.sampling.family,
            inputs=inputs,
            input_kind="video" if self.sampling.from_video else "image",
            fields=fields,
            defaults={name: value for name, value in defaults.items() if name in fields},
            sizes=[size_of(*size) for size in self.sizes],
            limits={
                "max_frames": self.max_frames,
                "max_steps": self.max_steps,
                "frames_unit": self.sampling.frames_unit,
                **limits,
            },
        )

    def check_model(self, id: str | None) -> None:
        """Refuses another model than the server's own; None stands for that."""
        if id not in (None, self.model):
            text = f"this server runs {self.model!r}, not {str(id)[:100]!r}"
            raise ApiError(404, "model_not_found", text, field="model", model=self.model)

    def checked(self, given: Any) -> VideoRequest:
        """The fields of a request."""
        try:
            return self.form.model_validate(given)
        except ValidationError as error:
            raise invalid_request(map(self._in_words, error.errors(include_url=False))) from None

    def _in_words(self, fault: Mapping[str, Any]) -> dict[str, str]:
        name = next(iter(fault["loc"]), "body")
        if fault["type"] == "extra_forbidden" and name in FIELDS:
            why = f"a model of the family {self.sampling.family}"
            if name in (IMAGE_FIELD, "fit"):
                why = "which makes clips from text alone"
            return {"field": name, "reason": f"is not for {self.model}, {why}"}
        return in_words({**fault, "loc": fault["loc"] or ("body",)})

    def sampling_of(self, request: VideoRequest) -> SamplingConfig:
        """The parameters of the requested clip."""
        self.check_model(request.model)
        if self.prompt == "refused" and request.value("prompt"):
            text = "Stable Video Diffusion takes no prompt"
            raise ApiError(422, "no_prompt", text, "leave prompt empty", field="prompt")
        params = params_by_field(type(self.sampling))
        given = {param.name: request.value(field) for field, param in params.items()}
        given["fit"] = request.value("fit")
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if request.size is not None:
            chosen["width"], chosen["height"] = self._size(request.size)
        chosen["num_frames"] = self._frames(request)
        if self.sampling.decode_chunk_size is not None:
            chosen["decode_chunk_size"] = min(self.sampling.decode_chunk_size, chosen["num_frames"])
        if isinstance(self.sampling, PromptedSampling):
            chosen["from_image"] = IMAGE_FIELD in request.files
        return replace(self.sampling, **chosen)

    def _size(self, text: str) -> tuple[int, int]:
        known = {size_of(*size): size for size in self.sizes}
        if text not in known:
            raise ApiError(
                422,
                "wrong_size",
                f"this server makes clips of {', '.join(known)}, not {text}",
                "whoever starts the server can add sizes",
                field="size",
                size=text,
                sizes=list(known),
            )
        return known[text]

    def _frames(self, request: VideoRequest) -> int:
        frames: int | None = request.value("frames")
        if request.seconds is None:
            return self.sampling.frames if frames is None else frames
        if frames is not None:
            text = "frames and seconds contradict each other"
            raise ApiError(422, "frames_and_seconds", text, "give one", field="seconds")
        fps, unit = request.value("fps") or self.sampling.fps, self.sampling.frames_unit
        frames = max(1, round((request.seconds * fps - 1) / unit) * unit + 1)
        if frames > self.max_frames:
            raise ApiError(
                422,
                "too_many_frames",
                f"{request.seconds:g} seconds of {fps} frames are {frames} frames, and this server "
                f"makes {self.max_frames} at most",
                "ask for fewer seconds or fps",
                field="seconds",
                frames=frames,
                max_frames=self.max_frames,
            )
        return frames


def _field(schema: Mapping[str, Any]) -> FormField:
    value = next(iter(schema.get("anyOf", [schema])))
    return FormField(
        type=value["type"],
        description=schema.get("description", ""),
        minimum=value.get("minimum", value.get("exclusiveMinimum")),
        maximum=value.get("maximum"),
        choices=value.get("enum"),
    )
