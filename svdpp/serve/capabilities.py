"""What clients may request of a server: its model, form, sizes and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from svdpp.config import SamplingConfig
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS
from svdpp.config.sampling import PromptedSampling
from svdpp.models.checkpoint import Checkpoint, Use
from svdpp.serve.api_errors import ApiError
from svdpp.serve.form import PHOTO_FIELDS, VideoRequest, form_of, params_by_field
from svdpp.serve.views import FormField, Model, params_view, size_of

#: Fields that `Model.inputs` is about, and the model itself.
_INPUTS = ("model", "input_reference", "prompt", "negative_prompt")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What clients may request.

    Args:
        model: its id.
        sampling: the defaults, resolved.
        sizes: width and height of the frames that clients may choose.
        weights: fingerprint or commit of the model's weights; empty if they never change.
        photo: whether a photograph is `needed`, `optional` or `refused`.
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

    def why_not(self, name: str) -> str:
        """Why the form does not have the field `name` of other forms."""
        if name in PHOTO_FIELDS:
            return f"is not for {self.model}, which makes clips from text alone"
        return f"is not for {self.model}, a model of the family {self.sampling.family}"

    @cached_property
    def form(self) -> type[VideoRequest]:
        """The form of a request."""
        limits = {"max_steps": self.max_steps, "max_frames": self.max_frames}
        return form_of(self.sampling.family, self.photo, **limits)

    @cached_property
    def fields(self) -> dict[str, FormField]:
        """The fields of the form beside the model and its inputs."""
        schemas = self.form.model_json_schema()["properties"]
        left_out = {*_INPUTS, *self.unused}
        return {name: _field(schema) for name, schema in schemas.items() if name not in left_out}

    def to_json(self, **limits: Any) -> Model:
        """The model as `/v1/models` lists it."""
        defaults = params_view(self.sampling)
        return Model(
            id=self.model,
            family=self.sampling.family,
            inputs={
                "input_reference": self.photo,
                "prompt": self.prompt,
                "negative_prompt": "refused" if self.prompt == "refused" else "optional",
            },
            fields=self.fields,
            defaults={name: value for name, value in defaults.items() if name in self.fields},
            sizes=[size_of(*size) for size in self.sizes],
            limits={
                "max_frames": self.max_frames,
                "max_steps": self.max_steps,
                "frames_unit": self.sampling.frames_unit,
                **limits,
            },
        )

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
            chosen["from_image"] = request.photo is not None
        return replace(self.sampling, **chosen)

    def check_model(self, id: str | None) -> None:
        """Refuses another model than the server's own; None stands for that."""
        if id not in (None, self.model):
            text = f"this server runs {self.model!r}, not {str(id)[:100]!r}"
            raise ApiError(404, "model_not_found", text, field="model", model=self.model)

    def _size(self, text: str) -> tuple[int, int]:
        width, _, height = text.partition("x")
        size = int(width), int(height)
        if size not in self.sizes:
            sizes = [size_of(*known) for known in self.sizes]
            raise ApiError(
                422,
                "wrong_size",
                f"this server makes clips of {', '.join(sizes)}, not {text}",
                "whoever starts the server can add sizes",
                field="size",
                size=text,
                sizes=sizes,
            )
        return size

    def _frames(self, request: VideoRequest) -> int:
        frames: int | None = request.value("frames")
        if request.seconds is None:
            return self.sampling.frames if frames is None else frames
        if frames is not None:
            text = "frames and seconds contradict each other"
            raise ApiError(422, "frames_and_seconds", text, "give one", field="seconds")
        fps = request.value("fps") or self.sampling.fps
        unit = self.sampling.frames_unit
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
