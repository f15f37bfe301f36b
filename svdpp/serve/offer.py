"""Owns what clients may request of a server: its model, sizes and limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from svdpp.config import SvdSampling
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS
from svdpp.serve.api_errors import ApiError
from svdpp.serve.schemas import Model, VideoRequest, model_defaults, size_of


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What clients may request.

    Args:
        model: its id.
        sampling: the defaults, resolved.
        sizes: width and height of the frames that clients may choose.
        drafts: whether the ranks draft clips that find them idle.
    """

    model: str
    sampling: SvdSampling
    sizes: tuple[tuple[int, int], ...]
    drafts: bool = False

    def to_json(self, **limits: Any) -> Model:
        """The model as `/v1/models` lists it."""
        known = {"max_frames": MAX_FRAMES, "max_steps": MAX_STEPS, **limits}
        return Model(
            id=self.model,
            defaults=model_defaults(self.sampling),
            drafts=self.drafts,
            sizes=[size_of(*size) for size in self.sizes],
            limits=known,
        )

    def wants_draft(self, request: VideoRequest) -> bool:
        """Whether the ranks draft the requested clip if it finds them idle."""
        return self.drafts and request.draft != "off"

    def sampling_of(self, request: VideoRequest) -> SvdSampling:
        """The parameters of the requested clip.

        Raises:
            ApiError: this server does not make such clips.
            RequestError: values contradict each other.
        """
        if request.model not in (None, self.model):
            raise ApiError(
                404,
                "model_not_found",
                f"this server runs {self.model!r}, not {request.model[:100]!r}",
                details={"field": "model", "model": self.model},
            )
        if request.prompt:
            raise ApiError(
                422,
                "no_prompt",
                "Stable Video Diffusion takes no prompt",
                "leave prompt empty",
                details={"field": "prompt"},
            )
        if request.draft == "auto" and not self.drafts:
            raise ApiError(
                422,
                "no_drafts",
                "this server makes no drafts",
                "leave draft out",
                details={"field": "draft"},
            )
        given = {
            "num_inference_steps": request.steps,
            "fps": request.fps,
            "motion_bucket_id": request.motion_bucket_id,
            "noise_aug_strength": request.noise_aug_strength,
            "min_guidance_scale": request.min_guidance_scale,
            "max_guidance_scale": request.max_guidance_scale,
            "fit": request.fit,
        }
        chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if request.size is not None:
            chosen["width"], chosen["height"] = self._size(request.size)
        chosen["num_frames"] = self._frames(request)
        chunk = self.sampling.decode_chunk_size or self.sampling.frames
        chosen["decode_chunk_size"] = min(chunk, chosen["num_frames"])
        return replace(self.sampling, **chosen)

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
        return max(1, round(request.seconds * fps))
