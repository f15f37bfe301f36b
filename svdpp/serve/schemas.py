"""Owns the JSON of the API: what a request may hold, and what the answers look like."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

from svdpp.config import SvdSampling
from svdpp.config.limits import (
    MAX_FPS,
    MAX_FRAMES,
    MAX_GUIDANCE_SCALE,
    MAX_MOTION_BUCKET_ID,
    MAX_NOISE_AUG_STRENGTH,
    MAX_STEPS,
)
from svdpp.serve.job import Job, JobState, Proof

#: The largest seed: torch.Generator.manual_seed takes 64 bits, and svdpp only those from 0.
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 9

Draft = Literal["auto", "off"]

_SIZE = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$"


class VideoRequest(BaseModel):
    """The form of `POST /v1/videos`. What is left out has the model's default."""

    model_config = ConfigDict(extra="forbid")

    input_reference: Annotated[
        UploadFile, Field(description="The photograph: PNG, JPEG, WebP, BMP, TIFF or GIF.")
    ]
    model: Annotated[
        str | None, Field(description="The id in `/v1/models`; by default that model.")
    ] = None
    prompt: Annotated[
        str | None,
        Field(
            description="Must be empty: Stable Video Diffusion takes no text.", max_length=10_000
        ),
    ] = None
    seed: Annotated[
        int | None, Field(ge=0, le=MAX_SEED, description="Of the noise; by default drawn.")
    ] = None
    seconds: Annotated[
        float | None,
        Field(gt=0, le=MAX_FRAMES, description="Length of the clip, instead of `frames`."),
    ] = None
    frames: Annotated[int | None, Field(ge=1, le=MAX_FRAMES)] = None
    size: Annotated[
        str | None,
        Field(pattern=_SIZE, description="Width x height, one of `sizes` in `/v1/models`."),
    ] = None
    steps: Annotated[int | None, Field(ge=1, le=MAX_STEPS, description="Denoising steps.")] = None
    fps: Annotated[int | None, Field(ge=1, le=MAX_FPS, description="Frames per second.")] = None
    motion_bucket_id: Annotated[
        int | None, Field(ge=0, le=MAX_MOTION_BUCKET_ID, description="Amount of motion.")
    ] = None
    noise_aug_strength: Annotated[
        float | None,
        Field(ge=0, le=MAX_NOISE_AUG_STRENGTH, description="Noise added to the photograph."),
    ] = None
    min_guidance_scale: Annotated[
        float | None, Field(ge=0, le=MAX_GUIDANCE_SCALE, description="Of the first frame.")
    ] = None
    max_guidance_scale: Annotated[
        float | None, Field(ge=0, le=MAX_GUIDANCE_SCALE, description="Of the last frame.")
    ] = None
    fit: Annotated[
        Literal["stretch", "crop", "pad"] | None,
        Field(description="How a photograph of another shape becomes the frame."),
    ] = None
    priority: Annotated[
        int, Field(ge=0, le=MAX_PRIORITY, description="Higher ones are taken earlier.")
    ] = 0
    draft: Annotated[
        Draft | None,
        Field(
            description="`auto`: if the clip finds all ranks idle, they show a draft of it first; "
            "by default, if the server makes drafts."
        ),
    ] = None


class ErrorBody(BaseModel):
    """What is wrong with a request, or what happened to a clip."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


class TypedError(ErrorBody):
    """An error as the API answers it."""

    type: str


class ErrorAnswer(BaseModel):
    """The body of every answer of 400 and above."""

    error: TypedError


class Input(BaseModel):
    """The photograph of a clip."""

    name: str
    sha256: str


class Video(BaseModel):
    """One requested clip. Times are unix seconds."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    id: str
    object: Literal["video"] = "video"
    model: str
    status: JobState
    progress: Annotated[int, Field(ge=0, le=100, description="Percent.")]
    created_at: int
    started_at: int | None
    completed_at: int | None
    expires_at: int | None
    size: str
    seconds: str
    frames: int
    fps: int
    steps: int
    seed: int
    motion_bucket_id: int
    noise_aug_strength: float
    min_guidance_scale: float
    max_guidance_scale: float
    fit: Literal["stretch", "crop", "pad"]
    priority: int
    draft: Draft
    has_draft: Annotated[bool, Field(description="Whether `content?variant=draft` exists now.")]
    place: Annotated[int | None, Field(description="Clips before it; null once it is begun.")]
    eta_seconds: float | None
    step: int
    rank: int | None
    error: ErrorBody | None
    proof: Proof
    input: Input


class VideoPage(BaseModel):
    """A page of the list of clips."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(BaseModel):
    """The answer to `DELETE`: a running clip is cancelled, a finished one is removed."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Annotated[bool, Field(description="Whether its row and files are removed.")]
    status: JobState


class Model(BaseModel):
    """The model that this server runs."""

    id: str
    object: Literal["model"] = "model"
    defaults: dict[str, Any]
    drafts: Annotated[bool, Field(description="Whether this server makes drafts.")]
    sizes: list[str]
    limits: dict[str, Any]


class ModelList(BaseModel):
    """The models of this server: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Rank(BaseModel):
    """What a rank does now."""

    rank: int
    device: str
    video: str | None
    action: str
    step: int | None
    doing: Literal["compute", "wait", "idle"]


class RankSpan(BaseModel):
    """What a rank did, in unix seconds."""

    rank: int
    video: str | None
    kind: Literal["encode", "denoise", "decode"]
    start: float
    end: float


class EngineStatus(BaseModel):
    """The ranks now and in the last minute."""

    state: Literal["starting", "ready", "restarting", "closing"]
    restarts: int
    queue: dict[JobState, int]
    ranks: list[Rank]
    spans: list[RankSpan]
    eta_error: dict[str, float | int | None]


class Health(BaseModel):
    """Whether the ranks live."""

    status: Literal["ok", "unavailable"]
    state: Literal["starting", "ready", "restarting", "closing"]
    ranks: int
    restarts: int


def model_defaults(sampling: SvdSampling) -> dict[str, Any]:
    """An `SvdSampling` by the names of the API."""
    return {
        "steps": sampling.num_inference_steps,
        "frames": sampling.frames,
        "fps": sampling.fps,
        "size": size_of(sampling.width, sampling.height),
        "seconds": seconds_of(sampling.frames, sampling.fps),
        "motion_bucket_id": sampling.motion_bucket_id,
        "noise_aug_strength": sampling.noise_aug_strength,
        "min_guidance_scale": sampling.min_guidance_scale,
        "max_guidance_scale": sampling.max_guidance_scale,
        "fit": sampling.fit,
    }


def size_of(width: int, height: int) -> str:
    """The size as the API writes it."""
    return f"{width}x{height}"


def seconds_of(frames: int, fps: int) -> str:
    """The length of a clip; text, as in OpenAI's API."""
    return f"{frames / fps:.2f}"


def video_of(
    job: Job,
    *,
    model: str,
    place: int | None = None,
    eta_seconds: float | None = None,
    steps_done: int = 0,
    rank: int | None = None,
    has_draft: bool = False,
    expires_at: float | None = None,
) -> Video:
    """The API's view of a job.

    Args:
        job: as stored.
        model: its id.
        place: number of clips that begin before it; None if it is not waiting.
        eta_seconds: until it is completed; None if unknown or final.
        steps_done: of a running clip.
        rank: that works on it.
        has_draft: whether its draft is written, and the exact clip is not.
        expires_at: when its files are removed.
    """
    is_done = job.state is JobState.COMPLETED
    steps = job.sampling.num_inference_steps
    step = steps if is_done else min(steps_done, steps)
    return Video(
        id=job.id,
        model=model,
        status=job.state,
        progress=100 if is_done else min(99, 100 * step // steps),
        created_at=int(job.created_at),
        started_at=_whole(job.started_at),
        completed_at=_whole(job.finished_at) if is_done else None,
        expires_at=_whole(expires_at),
        **model_defaults(job.sampling),
        seed=job.seed,
        priority=job.priority,
        draft="auto" if job.wants_draft else "off",
        has_draft=has_draft,
        place=place,
        eta_seconds=None if eta_seconds is None else round(max(0.0, eta_seconds), 3),
        step=step,
        rank=rank,
        error=None if job.error is None else error_body(job.error),
        proof=job.proof,
        input=Input(name=job.photo_name, sha256=job.photo_sha256),
    )


def error_body(record: dict[str, Any]) -> ErrorBody:
    """What `errors.error_to_dict` wrote, by the names of the API."""
    return ErrorBody(
        code=record.get("type") or "SvdppError",
        message=str(record.get("message", "")),
        hint=str(record.get("hint", "")),
        details=dict(record.get("details") or {}),
    )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
