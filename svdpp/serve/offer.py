"""What clients may request of a server: its model, sizes and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from svdpp.config import SamplingConfig
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS
from svdpp.config.sampling import PromptedSampling
from svdpp.models.checkpoint import Checkpoint, Use
from svdpp.serve.api_errors import ApiError
from svdpp.serve.forms import API_NAMES, PHOTO_FIELDS, VideoRequest, form_of
from svdpp.serve.schemas import FormField, Model, model_defaults, size_of

#: Fields that `Model.inputs` is about, and the model itself.
_INPUTS = ("model", "input_reference", "prompt", "negative_prompt")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a model does with photographs and prompts.

    Args:
        photo: `needed`, `optional` or `refused`.
        prompt: the same; a negative prompt is optional wherever there is a prompt.
        unused: sampling parameters of the family that have no effect on the model.
    """

    photo: Use = "needed"
    prompt: Use = "refused"
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint | None) -> Inputs:
        """Those of a checkpoint; None: the dummy model, which takes the place of SVD."""
        if checkpoint is None:
            return cls()
        return cls(
            photo=checkpoint.image_use,
            prompt=checkpoint.prompt_use,
            unused=checkpoint.unused_parameters,
        )


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What clients may request.

    Args:
        model: its id.
        sampling: the defaults, resolved.
        sizes: width and height of the frames that clients may choose.
        weights: fingerprint or commit of the model's weights; empty if they never change.
        inputs: what the model does with photographs and prompts.
        max_steps: of a clip.
        max_frames: of a clip.
    """

    model: str
    sampling: SamplingConfig
    sizes: tuple[tuple[int, int], ...]
    weights: str = ""
    inputs: Inputs = field(default_factory=Inputs)
    max_steps: int = MAX_STEPS
    max_frames: int = MAX_FRAMES

    def why_not(self, name: str) -> str:
        """Why the form does not have the field `name` of other forms."""
        if name in PHOTO_FIELDS:
            return f"is not for {self.model}, which makes clips from text alone"
        return f"is not for {self.model}, a model of the family {self.sampling.family}"

    @cached_property
    def form(self) -> type[VideoRequest]:
        """The form of a request."""
        return form_of(
            self.sampling.family,
            self.inputs.photo,
            max_steps=self.max_steps,
            max_frames=self.max_frames,
        )

    @cached_property
    def fields(self) -> dict[str, FormField]:
        """The fields of the form beside the model and its inputs."""
        known = self.form.model_json_schema()["properties"]
        unused = {*_INPUTS, *self.inputs.unused}
        return {name: _field(about) for name, about in known.items() if name not in unused}

    def to_json(self, **limits: Any) -> Model:
        """The model as `/v1/models` lists it."""
        known = {
            "max_frames": self.max_frames,
            "max_steps": self.max_steps,
            "frames_unit": self.sampling.frames_unit,
            **limits,
        }
        defaults = model_defaults(self.sampling)
        prompt = self.inputs.prompt
        return Model(
            id=self.model,
            family=self.sampling.family,
            inputs={
                "input_reference": self.inputs.photo,
                "prompt": prompt,
                "negative_prompt": "refused" if prompt == "refused" else "optional",
            },
            fields=self.fields,
            defaults={name: value for name, value in defaults.items() if name in self.fields},
            sizes=[size_of(*size) for size in self.sizes],
            limits=known,
        )

    def sampling_of(self, request: VideoRequest) -> SamplingConfig:
        """The parameters of the requested clip."""
        self._check(request)
        names = (each.name for each in fields(self.sampling))
        given = {name: request.value(API_NAMES.get(name, name)) for name in names}
        chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if request.size is not None:
            chosen["width"], chosen["height"] = self._size(request.size)
        chosen["num_frames"] = self._frames(request)
        if self.sampling.decode_chunk_size is not None:
            chosen["decode_chunk_size"] = min(self.sampling.decode_chunk_size, chosen["num_frames"])
        if isinstance(self.sampling, PromptedSampling):
            chosen["from_image"] = request.photo is not None
        return replace(self.sampling, **chosen)

    def _check(self, request: VideoRequest) -> None:
        if request.model not in (None, self.model):
            raise no_model(request.model, self.model)
        if self.inputs.prompt == "refused" and request.value("prompt"):
            raise ApiError(
                422,
                "no_prompt",
                "Stable Video Diffusion takes no prompt",
                "leave prompt empty",
                details={"field": "prompt"},
            )

    def _size(self, text: str) -> tuple[int, int]:
        width, _, height = text.partition("x")
        size = int(width), int(height)
        if size not in self.sizes:
            sizes = [size_of(*each) for each in self.sizes]
            raise ApiError(
                422,
                "wrong_size",
                f"this server makes clips of {', '.join(sizes)}, not {text}",
                "--sizes at its start names more",
                details={"field": "size", "size": text, "sizes": sizes},
            )
        return size

    def _frames(self, request: VideoRequest) -> int:
        if request.seconds is None:
            return self.sampling.frames if request.frames is None else request.frames
        if request.frames is not None:
            raise ApiError(
                422,
                "frames_and_seconds",
                "frames and seconds contradict each other",
                "give one",
                details={"field": "seconds"},
            )
        fps = self.sampling.fps if request.fps is None else request.fps
        unit = self.sampling.frames_unit
        frames = max(1, round((request.seconds * fps - 1) / unit) * unit + 1)
        if frames > self.max_frames:
            raise ApiError(
                422,
                "too_many_frames",
                f"{request.seconds:g} seconds of {fps} frames are {frames} frames, and this server "
                f"makes {self.max_frames} at most",
                "ask for fewer seconds or fps",
                details={"field": "seconds", "frames": frames, "max_frames": self.max_frames},
            )
        return frames


def no_model(asked: str, own: str) -> ApiError:
    """The refusal of another model than the server's own."""
    return ApiError(
        404,
        "model_not_found",
        f"this server runs {own!r}, not {asked[:100]!r}",
        details={"field": "model", "model": own},
    )


def _field(schema: Mapping[str, Any]) -> FormField:
    value = next(iter(schema.get("anyOf", [schema])))
    return FormField(
        type=value["type"],
        description=schema.get("description", ""),
        minimum=value.get("minimum", value.get("exclusiveMinimum")),
        maximum=value.get("maximum"),
        choices=value.get("enum"),
    )
