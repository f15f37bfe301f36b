"""Schema of the requests that a server's model accepts; conversion to sampling parameters.

The schema has only the fields of the server's model, so that the OpenAPI document shows which
fields the server accepts.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Self

from fastapi import UploadFile
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import from_json

from svdpp.config import Fit, Param, PromptedSampling, SamplingConfig
from svdpp.config.families.registry import (
    FAMILY_SPECS,
    LAST_IMAGE_FAMILIES,
    REFERENCE_FAMILIES,
)
from svdpp.config.limits import (
    MAX_FRAMES,
    MAX_PROMPT_CHARACTERS,
    MAX_REFERENCES,
    MAX_SEED,
    MAX_STEPS,
)
from svdpp.config.pipeline import LAST_IMAGE, REFERENCES, reference_names
from svdpp.config.sampling import as_whole, frames_of_seconds, params_by_field
from svdpp.errors import nearest
from svdpp.models.checkpoint import Checkpoint, InputUse
from svdpp.serve.loras import LoraCatalog
from svdpp.serve.schemas import IMAGE_FIELD, ApiError, format_size, invalid_request, params_to_json

#: Hint of the error for a field that the server's model does not accept, by the field's name.
_UNSUPPORTED = {
    "extra_params": "send each parameter as a field of its own; /v1/models lists them",
    "lora": "leave the field out: this server offers no LoRAs",
    "denoiser": "leave the field out: the server has one denoiser for all clips",
    "attention_backend": "leave the field out: the server has one attention backend for all clips",
    "video_reference": "send the video as the field input_reference, if the model takes a video",
    "boundary_ratio": "leave the field out: the server uses the checkpoint's value",
    "guidance_rescale": "this model does not use guidance_rescale",
    LAST_IMAGE: f"these families take one: {', '.join(LAST_IMAGE_FAMILIES)}",
    REFERENCES: f"these families take references: {', '.join(REFERENCE_FAMILIES)}",
}

MAX_PRIORITY = 9
MAX_URL_CHARACTERS = 2000

_SIZE = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$"
#: Accepted names of the image's field: svdpp's name, vLLM-Omni's name, and the name under which
#: OpenAI's client sends `{"image_url": ...}` in a form.
_IMAGE_NAMES = AliasChoices(IMAGE_FIELD, "image_reference", f"{IMAGE_FIELD}[image_url]")


def parse_json(text: bytes) -> Any:
    """Parse the JSON text of a request; raise an `ApiError` if an object repeats a key.

    Raises:
        ValueError: The text is not JSON.
        ApiError: An object has the same key twice.
    """
    value = from_json(text)
    # Pydantic's parser silently keeps the last of several values with the same key.
    json.loads(text, object_pairs_hook=without_repetition)
    return value


def without_repetition(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a request's fields as a dict; raise an `ApiError` if a field is repeated.

    Args:
        items: Names and values of a form, or keys and values of a JSON object, in the order in
            which they were sent.

    Raises:
        ApiError: A name is repeated.
    """
    numbers = Counter(name for name, _ in items)
    if repeated := [name for name, number in numbers.items() if number > 1]:
        name, times = repeated[0], numbers[repeated[0]]
        text = f"the field {name[:60]!r} is sent {times} times"
        hint = "send each field once"
        raise ApiError(422, "repeated_field", text, hint, field=name[:60], times=times)
    return dict(items)


def _parse_upload(value: Any) -> Any:
    """Return the upload in a request's field as a file; decode text in base64 or a data URL.

    Args:
        value: File, text, or an object that OpenAI's clients send: `{"image_url": ...}` or
            `{"image_url": {"url": ...}}`, possibly as JSON text.

    Raises:
        ValueError: The value has another form.
    """
    if value is None or hasattr(value, "filename"):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = from_json(value)
    for name in ("image_url", "url"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    if not isinstance(value, str):
        raise ValueError('send a file, base64, a data URL, or {"image_url": "data:..."}')
    content = _decode_text(value)
    return UploadFile(io.BytesIO(content), size=len(content))


def _decode_text(text: str) -> bytes:
    if not text.isascii():
        # `curl -F name=<FILE` sends the bytes of a file without a `filename`. If the bytes are not
        # UTF-8, Starlette decodes them as latin-1, so encoding as latin-1 restores the bytes.
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            raise ValueError("the value is text: send a file, as curl -F name=@file does") from None
    if "://" in text[:20]:
        raise ValueError("URLs are not fetched: send the image itself, or as a data URL")
    head, is_url, encoded = text.partition(",")
    if is_url and not (head.startswith("data:") and head.endswith(";base64")):
        raise ValueError("a data URL must be in base64")
    try:  # white space is removed, because MIME and the command `base64` break long lines
        return base64.b64decode("".join((encoded if is_url else text).split()), validate=True)
    except binascii.Error as error:
        text = f"it is not base64 ({error}): send a file, as curl -F name=@file does"
        raise ValueError(text) from None


def _reject_bool(value: Any) -> Any:
    """Reject true and false for a number in a request: Python would accept them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"it must be a number, got {str(value).lower()}")
    return value


# In an annotation, this validator must follow the bounds, as in
# `Annotated[int | None, Field(le=9), _NUMBER]`. Pydantic then applies the bounds only to numbers.
# In the other order, pydantic would also compare null with the bounds, and fail.
_NUMBER = BeforeValidator(_reject_bool)


_Upload = Annotated[UploadFile, BeforeValidator(_parse_upload)]


_REFERENCE_NAMES = frozenset(reference_names(MAX_REFERENCES))


def field_of(file_name: str) -> str:
    """Return the request field that contains a file, such as `references` for `reference_1`.

    Args:
        file_name: Key of the file in `VideoRequest.files`.
    """
    return REFERENCES if file_name in _REFERENCE_NAMES else file_name


def _listed(value: Any) -> Any:
    """Return the uploads in a request's field as a list, even if there is only one upload."""
    return value if value is None or isinstance(value, list) else [value]


class VideoRequest(BaseModel):
    """Body of `POST /v1/videos`. A field that is left out has the model's default.

    vLLM-Omni's names of fields are accepted too: `num_frames`, `num_inference_steps`,
    `max_sequence_length`, `image_reference`, and `width` with `height`.
    """

    model_config = ConfigDict(extra="forbid", loc_by_alias=False)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Drop a request's empty fields, and combine `width` and `height` into `size`."""
        named = {name: value for name, value in fields.items() if value != ""}
        if named.keys() & {"width", "height"} and "size" not in named:
            named["size"] = f"{named.pop('width', '')}x{named.pop('height', '')}"
        return named

    model: Annotated[
        str | None, Field(description="Id of the server's model, as in `/v1/models`.")
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=0, le=MAX_SEED, description="Seed of the noise; by default random."),
        _NUMBER,
    ] = None
    seconds: Annotated[
        float | None,
        Field(
            gt=0, le=MAX_FRAMES, description="Length of the clip in seconds, instead of `frames`."
        ),
        _NUMBER,
    ] = None
    size: Annotated[
        str | None,
        Field(
            pattern=_SIZE,
            description="Width and height, such as 832x480; one of `sizes` in `/v1/models`.",
        ),
    ] = None
    user: Annotated[
        str | None,
        Field(max_length=1000, description="Ignored. OpenAI's clients send an id of their user."),
    ] = None
    priority: Annotated[
        int,
        Field(ge=0, le=MAX_PRIORITY, description="Jobs of higher priority start earlier."),
        _NUMBER,
    ] = 0
    callback_url: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[!-~]+$",
            max_length=MAX_URL_CHARACTERS,
            description="URL that gets a webhook when the clip is completed or failed.",
        ),
    ] = None

    def value(self, name: str) -> Any:
        """Return the value of a request's field; None if the request or the schema lacks it."""
        return getattr(self, name, None)

    @property
    def files(self) -> dict[str, UploadFile]:
        """Uploaded files of a request by field; references as `reference_1` and so on."""
        files = {name: value for name, value in self if hasattr(value, "filename")}
        references = self.value(REFERENCES) or []
        return files | dict(zip(reference_names(len(references)), references, strict=True))


_VIDEO = "MP4, MOV, WebM or Matroska; an image is repeated for all frames"


def _input_fields(use: InputUse, *, videos: bool = False) -> dict[str, Any]:
    if use == "refused":
        return {}
    formats = "PNG, JPEG, WebP, BMP, TIFF, GIF or AVIF"
    text = f"Input video: {_VIDEO}" if videos else f"Input image: {formats}"
    if use == "needed":
        upload: Any = (_Upload, Field(validation_alias=_IMAGE_NAMES, description=f"{text}."))
    else:
        text += "; optional, without it the clip is made from the prompt alone."
        upload = (_Upload | None, Field(None, validation_alias=_IMAGE_NAMES, description=text))
    fit = Field(
        None, description="Method by which an image of another aspect ratio is fitted to the frame."
    )
    return {IMAGE_FIELD: upload, "fit": (Fit | None, fit)}


def _last_image_fields(use: InputUse) -> dict[str, Any]:
    text = "Image that becomes the last frame of the clip"
    match use:
        case "needed":
            return {LAST_IMAGE: (_Upload, Field(description=f"{text}."))}
        case "optional":
            return {LAST_IMAGE: (_Upload | None, Field(None, description=f"{text}; optional."))}
    return {}


def _reference_fields(highest: int) -> dict[str, Any]:
    if not highest:
        return {}
    text = f"Up to {highest} further images of what the clip shows, besides {IMAGE_FIELD}."
    kind = Annotated[list[_Upload] | None, BeforeValidator(_listed)]
    return {REFERENCES: (kind, Field(None, max_length=highest, description=text))}


def _video_fields(names: Iterable[str]) -> dict[str, Any]:
    return {
        name: (_Upload, Field(description=f"{name.replace('_', ' ').capitalize()}: {_VIDEO}."))
        for name in names
    }


def _prompt_fields(kind: type[Any]) -> dict[str, Any]:
    if not issubclass(kind, PromptedSampling):
        empty = "Must be empty, because Stable Video Diffusion takes no text."
        return {"prompt": (str | None, Field(None, max_length=10_000, description=empty))}
    length = MAX_PROMPT_CHARACTERS
    negative = Field(
        None, max_length=length, description="Description of what must not be in the clip."
    )
    return {
        "prompt": (
            str,
            Field(max_length=length, description="Description of what happens in the clip."),
        ),
        "negative_prompt": (str | None, negative),
    }


def _lora_field(names: Sequence[str] | None) -> dict[str, Any]:
    """Return a dict with the pydantic field `lora`, or an empty dict if requests may use no LoRA.

    Args:
        names: Names of LoRAs that requests may use; None: any name.
    """
    if names == ():
        return {}
    one = {
        "type": "object",
        "properties": {
            "name": {"type": "string"} | ({} if names is None else {"enum": list(names)}),
            "scale": {"type": "number", "default": 1},
            "expert": {"type": "string", "enum": ["high", "low"]},
        },
        "required": ["name"],
    }
    several = {"type": "array", "items": {"anyOf": [one, {"type": "string"}]}}
    schema = WithJsonSchema({"anyOf": [one, {"type": "string"}, several]})
    text = "LoRA or list of LoRAs: each is a name, or an object with a scale; in a form as JSON."
    return {"lora": (Annotated[Any, schema], Field(None, description=text))}


def _param_field(param: Param, highest: float) -> Any:
    """Return type and pydantic field of a request for a sampling parameter.

    Requests may use svdpp's name of the parameter, or diffusers' name, which vLLM-Omni uses, too.

    Args:
        param: The parameter.
        highest: Largest value that requests may use.
    """
    default = f" By default {param.shown_default}." if param.shown_default else ""
    lowest: dict[str, Any] = {"gt" if param.excludes_lowest else "ge": param.lowest}
    names = AliasChoices(*dict.fromkeys((param.field, param.name)))
    kind: Any = Annotated[param.kind | None, Field(le=highest, **lowest), _NUMBER]
    return (kind, Field(None, validation_alias=names, description=f"{param.help}{default}"))


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a server's model: accepted inputs, defaults and limits of requests."""

    model: str
    sampling: SamplingConfig
    """Default sampling parameters of the model, all filled in. A request can replace them."""
    sizes: tuple[tuple[int, int], ...]
    """Frame sizes that clients may request, each width and height in pixels."""
    weights: str = ""
    """Fingerprint (of a local folder) or commit (of a hub model) of the weights, with the hashes of
    files that replace or change weights, such as LoRAs. Empty for the dummy model and demo models,
    whose weights never change."""
    image_use: InputUse = "needed"
    last_image_use: InputUse = "refused"
    last_image_reason: str = ""
    """Reason why the model takes no last image although other models of its family do; empty if
    there is no such reason."""
    prompt_use: InputUse = "refused"
    """Whether the model needs a prompt, takes an optional one, or refuses prompts. If a prompt is
    accepted, a negative prompt is optional."""
    unused: tuple[str, ...] = ()
    """Names of the family's parameters that have no effect on this model."""
    loras: LoraCatalog = field(default_factory=LoraCatalog)
    """LoRAs that requests may add."""
    is_shared: bool = False
    """Whether requests may also name LoRAs that only other servers of the queue have."""
    max_steps: int = MAX_STEPS
    max_frames: int = MAX_FRAMES

    @classmethod
    def of(cls, model: str, checkpoint: Checkpoint | None, **settings: Any) -> Self:
        """Return the capabilities of a server that runs a checkpoint.

        Args:
            model: Name of the model. For a local checkpoint, its folder's name is used instead.
            checkpoint: Checkpoint of the model; None for the dummy model, which behaves like SVD.
            settings: Further fields of the `Capabilities`, such as `sizes`.
        """
        if checkpoint is None:
            return cls(model=model, **settings)
        weights = ""
        if checkpoint.fingerprint is not None:
            # The model is named after the folder, because clients must not see the folder's path.
            model, weights = checkpoint.folder.name, checkpoint.fingerprint
        elif checkpoint.revision is not None:
            weights = ".".join(filter(None, (checkpoint.revision, checkpoint.variant)))
        added = [f"{part}={at}" for part, at in sorted(checkpoint.external_components.items())]
        added += [file.identity for file in checkpoint.loras]
        added += [file.identity for file in checkpoint.denoisers]
        return cls(
            model=model,
            weights=".".join(filter(None, (weights, *added))),
            image_use=checkpoint.image_use,
            last_image_use=checkpoint.last_image_use,
            last_image_reason=checkpoint.last_image_reason,
            prompt_use=checkpoint.prompt_use,
            unused=checkpoint.unused_parameters,
            loras=LoraCatalog(checkpoint),
            **settings,
        )

    @property
    def model_key(self) -> str:
        """Key of the model, equal to `Job.model_key` of the jobs that the server can make.

        The key is the fingerprint or commit of the weights, or else the model's name.
        """
        return self.weights or self.model

    @property
    def _params(self) -> dict[str, Param]:
        return params_by_field(type(self.sampling))

    @property
    def _max_references(self) -> int:
        return FAMILY_SPECS[self.sampling.family].max_references

    @property
    def _lora_names(self) -> tuple[str, ...] | None:
        """Names of LoRAs that requests may use; None: any, because other servers may have more."""
        return None if self.is_shared and self.loras.fits_model else tuple(self.loras.names)

    @cached_property
    def request_model(self) -> type[VideoRequest]:
        """Pydantic model of a request, with the fields of the server's model."""
        kind = type(self.sampling)
        highest = {"steps": self.max_steps, "frames": self.max_frames}
        return create_model(
            "VideoRequest",
            __base__=VideoRequest,
            __doc__=VideoRequest.__doc__,
            **_input_fields(self.image_use, videos=kind.from_video),
            **_last_image_fields(self.last_image_use),
            **_reference_fields(self._max_references),
            **_video_fields(kind.videos),
            **_prompt_fields(kind),
            **_lora_field(self._lora_names),
            **{
                name: _param_field(param, highest.get(name, param.highest))
                for name, param in params_by_field(kind).items()
            },
        )

    def to_json(self, **limits: Any) -> dict[str, Any]:
        """Return the entry of the server's model in the response of `/v1/models`.

        The entry has the inputs, fields, defaults and limits of requests.

        Args:
            limits: Limits to add to the object `limits` of the entry, such as `max_open`.
        """
        inputs: dict[str, InputUse] = {
            IMAGE_FIELD: self.image_use,
            LAST_IMAGE: self.last_image_use,
            REFERENCES: "optional" if self._max_references else "refused",
            "prompt": self.prompt_use,
            "negative_prompt": "refused" if self.prompt_use == "refused" else "optional",
            **dict.fromkeys(self.sampling.videos, "needed"),
        }
        left_out = {"model", "user", "lora", *inputs, *self.unused}
        schemas = self.request_model.model_json_schema()["properties"]
        fields = {name: _field(each) for name, each in schemas.items() if name not in left_out}
        defaults = params_to_json(self.sampling)
        return {
            "id": self.model,
            "object": "model",
            "family": self.sampling.family,
            "inputs": inputs,
            "input_kind": "video" if self.sampling.from_video else "image",
            "fields": fields,
            "defaults": {name: value for name, value in defaults.items() if name in fields},
            "sizes": [format_size(*size) for size in self.sizes],
            "loras": self.loras.to_json(),
            "limits": {
                "max_frames": self.max_frames,
                "max_steps": self.max_steps,
                "max_references": self._max_references,
                "frames_unit": self.sampling.frames_unit,
                "frames_remainder": self.sampling.frames_remainder,
                "priority": [0, MAX_PRIORITY],
                **limits,
            },
        }

    def check_model(self, id: str | None) -> None:
        """Raise an `ApiError` unless a request is for the server's model.

        Raises:
            ApiError: The request names another model.
        """
        if id not in (None, self.model):
            text = f"this server runs {self.model!r}, not {str(id)[:100]!r}"
            raise ApiError(404, "model_not_found", text, field="model", model=self.model)

    def validate(self, fields: Mapping[str, Any]) -> VideoRequest:
        """Parse a request's fields; raise an `ApiError` if one is unknown, missing or invalid.

        Args:
            fields: Values of a form or of a JSON object, by the name of the field.

        Raises:
            ApiError: A field is unknown, missing or invalid. For an unknown field, the hint says
                what to send instead, or names the most similar field.
        """
        try:
            return self.request_model.model_validate(fields)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            unknown = [str(each["loc"][0]) for each in errors if each["type"] == "extra_forbidden"]
            field_names = {
                *self.request_model.model_fields,
                *(param.name for param in self._params.values()),
            }
            hint = ""
            if unknown:
                reason = self.last_image_reason if unknown[0] == LAST_IMAGE else ""
                hint = reason or _UNSUPPORTED.get(unknown[0]) or nearest(unknown[0], field_names)
            raise invalid_request(errors, hint) from None

    def sampling_of(self, request: VideoRequest) -> SamplingConfig:
        """Return the sampling parameters of a requested clip: the request's, or else the defaults.

        Raises:
            ApiError: The request names another model, or asks for something that this server does
                not make, such as another size or too many frames.
            RequestError: A parameter does not fit the model.
        """
        self.check_model(request.model)
        if self.prompt_use == "refused" and request.value("prompt"):
            text = "Stable Video Diffusion takes no prompt"
            raise ApiError(422, "no_prompt", text, "leave prompt empty", field="prompt")
        params = self._params
        requested = {param.name: request.value(field) for field, param in params.items()}
        requested["fit"] = request.value("fit")
        arguments: dict[str, Any] = {
            name: value for name, value in requested.items() if value is not None
        }
        if request.size is not None:
            arguments["width"], arguments["height"] = self._size(request.size)
        arguments["num_frames"] = self._frames(request)
        if self.sampling.decode_chunk_size is not None:
            arguments["decode_chunk_size"] = min(
                self.sampling.decode_chunk_size, arguments["num_frames"]
            )
        if isinstance(self.sampling, PromptedSampling):
            arguments["from_image"] = IMAGE_FIELD in request.files
            arguments["has_last_image"] = LAST_IMAGE in request.files
            arguments["num_references"] = len(request.value(REFERENCES) or ())
        return replace(self.sampling, **arguments)

    def _size(self, text: str) -> tuple[int, int]:
        sizes = {format_size(*size): size for size in self.sizes}
        if text not in sizes:
            message = f"this server makes clips of {', '.join(sizes)}, not {text}"
            width, height = map(int, text.split("x"))
            near = min(self.sizes, key=lambda size: abs(size[0] - width) + abs(size[1] - height))
            hint = f"use {format_size(*near)}"
            raise ApiError(
                422, "wrong_size", message, hint, field="size", size=text, sizes=[*sizes]
            )
        return sizes[text]

    def _frames(self, request: VideoRequest) -> int:
        frames: int | None = request.value("frames")
        if request.seconds is None:
            return self.sampling.frames if frames is None else frames
        if frames is not None:
            text = "frames and seconds contradict each other"
            raise ApiError(
                422, "frames_and_seconds", text, "send either frames or seconds", field="seconds"
            )
        fps = as_whole(request.value("fps") or self.sampling.fps)
        frames = frames_of_seconds(request.seconds, fps, type(self.sampling))
        if frames > self.max_frames:
            text = (
                f"{request.seconds:g} s at {fps} fps are {frames} frames, and this server "
                f"makes {self.max_frames} at most"
            )
            raise ApiError(
                422,
                "too_many_frames",
                text,
                f"use {self.max_frames / fps:.2f} s",
                field="seconds",
                seconds=request.seconds,
                fps=fps,
                frames=frames,
                limit=self.max_frames,
            )
        return frames


def _field(schema: Mapping[str, Any]) -> dict[str, Any]:
    value = next(iter(schema.get("anyOf", [schema])))
    return {
        "type": value["type"],
        "description": schema["description"],
        "minimum": value.get("minimum", value.get("exclusiveMinimum")),
        "maximum": value.get("maximum"),
        "choices": value.get("enum"),
    }
