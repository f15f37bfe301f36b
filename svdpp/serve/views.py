"""The JSON of the API: the names of fields, and what the answers look like."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from svdpp.config import SAMPLING_CLASSES, Param, PromptedSampling, SamplingConfig, params_of
from svdpp.errors import redact_all, without_folders
from svdpp.models.checkpoint import Use
from svdpp.serve.engine import Rank, RankSpan
from svdpp.serve.job import EngineState, FleetServer, Job, JobState, Proof

Fit = Literal["stretch", "crop", "pad"]

#: Parameters that requests name in another way, or not at all.
_NOT_IN_FORMS = ("height", "width", "decode_chunk_size")


def params_by_field(kind: Any) -> dict[str, Param]:
    """The parameters of a sampling class that requests have, by their names in requests."""
    params = params_of(kind)
    return {param.field: param for name, param in params.items() if name not in _NOT_IN_FORMS}


#: The field of the image, or of the video in its place.
IMAGE_FIELD = "input_reference"

#: The fields of all servers' forms.
FIELDS = frozenset(
    {"model", "seed", "seconds", "size", "priority", "callback_url"}
    | {IMAGE_FIELD, "fit", "prompt", "negative_prompt"}
).union(*((*params_by_field(kind), *kind.videos) for kind in SAMPLING_CLASSES.values()))


class ErrorBody(BaseModel):
    """What is wrong with a request, or what happened to a clip."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = {}


class TypedError(ErrorBody):
    """An error as the API answers it."""

    type: str


class ErrorAnswer(BaseModel):
    """The body of every answer of 400 and above."""

    error: TypedError


#: Answers of 400 and above for the OpenAPI document.
ERRORS: dict[int | str, dict[str, Any]] = {
    statuses: {"model": ErrorAnswer} for statuses in ("4XX", "5XX")
}


class Callback(BaseModel):
    """The webhook of a clip."""

    url: str
    status: Annotated[
        Literal["pending", "delivered", "failed"], Field(description="`failed`: it was given up.")
    ]
    attempts: int
    error: Annotated[str | None, Field(description="Of the last attempt.")]


class Input(BaseModel):
    """The image of a clip."""

    name: str
    sha256: str


def _document_params(schema: dict[str, Any]) -> None:
    """Adds the parameters that only clips of some families have."""
    families: defaultdict[tuple[str, type, str], list[str]] = defaultdict(list)
    for family, kind in SAMPLING_CLASSES.items():
        for field, param in params_by_field(kind).items():
            families[field, param.kind, param.help].append(family)
    for (field, kind, help), names in families.items():
        if field not in Video.model_fields:
            schema["properties"][field] = {
                "type": ["integer" if kind is int else "number", "null"],
                "description": f"{help} Of {', '.join(names)}.",
            }


class Video(BaseModel):
    """One requested clip, with the parameters of its family. Times are unix seconds.

    A queue may hold clips of a model that its server ran earlier. Those of families with prompts
    have `prompt` and `negative_prompt`.
    """

    model_config = ConfigDict(
        json_schema_serialization_defaults_required=True,
        extra="allow",
        json_schema_extra=_document_params,
    )

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
    fit: Fit
    priority: int
    place: Annotated[int | None, Field(description="Clips before it; null once it is begun.")] = (
        None
    )
    held: Annotated[
        str | None,
        Field(
            description="Why the queued clip waits for another start of the server, such as one "
            "with its model; null if the ranks take it."
        ),
    ]
    eta_seconds: float | None
    step: int
    rank: int | None
    input: Annotated[Input | None, Field(description="Null for a clip from text alone.")]
    error: ErrorBody | None
    proof: Proof
    proof_reason: Annotated[
        str | None,
        Field(description="Why a `failed` comparison was not possible, or what is `different`."),
    ]
    callback: Annotated[
        Callback | None,
        Field(description="The webhook; null without one, and of a cancelled clip."),
    ]


class VideoPage(BaseModel):
    """A page of the list of clips."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(BaseModel):
    """The answer to `DELETE`: row and files are removed."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True
    status: Annotated[JobState, Field(description="What it had; `cancelled` if it was open.")]


class FormField(BaseModel):
    """One field of a request, for programs that show a form."""

    type: Literal["integer", "number", "string"]
    description: str = ""
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: list[str] | None = None


class Model(BaseModel):
    """The model that this server runs."""

    id: str
    object: Literal["model"] = "model"
    family: str
    inputs: Annotated[
        dict[str, Use],
        Field(description="What a request does with its files and prompts."),
    ]
    input_kind: Annotated[
        Literal["image", "video"],
        Field(description="Of `input_reference`; an image stands for a video that stands still."),
    ]
    fields: Annotated[
        dict[str, FormField],
        Field(description="The fields that a request may have, beside `model` and the inputs."),
    ]
    defaults: dict[str, Any]
    sizes: list[str]
    limits: dict[str, Any]


class ModelList(BaseModel):
    """The models of this server: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class ServerList(BaseModel):
    """The servers that share the queue."""

    object: Literal["list"] = "list"
    data: list[FleetServer]


class EngineStatus(BaseModel):
    """The ranks now and in the last minute."""

    state: EngineState
    restarts: int
    queue: dict[JobState, int]
    ranks: list[Rank]
    spans: list[RankSpan]
    eta_error: dict[str, float | int | None]


class Health(BaseModel):
    """Whether the ranks live, or whether requests are taken."""

    status: Literal["ok", "unavailable"]
    reason: str | None
    state: EngineState
    ranks: int
    restarts: int


def params_view(sampling: SamplingConfig) -> dict[str, Any]:
    """The parameters of a clip, or a model's defaults, by the names of the API."""
    params = params_by_field(type(sampling))
    return {
        **{field: getattr(sampling, param.name) for field, param in params.items()},
        "size": size_of(sampling.width, sampling.height),
        "seconds": f"{sampling.frames / sampling.fps:.2f}",  # text, as in OpenAI's API
        "fit": sampling.fit,
    }


def size_of(width: int, height: int) -> str:
    """The size as the API writes it."""
    return f"{width}x{height}"


def video_of(
    job: Job,
    *,
    step: int = 0,
    place: int | None = None,
    held: str | None = None,
    rank: int | None = None,
    eta_seconds: float | None = None,
    expires_at: float | None = None,
) -> Video:
    """The API's view of a job.

    Of an open one: the steps that are done, the seconds until it is completed, its `place` if it
    waits or why it is `held`, and its `rank`. Of a final one: when its files are removed.
    """
    is_done = job.state is JobState.COMPLETED
    steps = job.sampling.num_inference_steps
    step = steps if is_done else min(step, steps)
    values = params_view(job.sampling)
    if job.videos:
        values |= {"videos": {name: {"sha256": sha256} for name, sha256 in job.videos.items()}}
    if isinstance(job.sampling, PromptedSampling):
        values |= {"prompt": job.prompt, "negative_prompt": job.negative_prompt}
    return Video(
        id=job.id,
        model=job.model,
        status=job.state,
        progress=100 if is_done else min(99, 100 * step // steps),
        created_at=int(job.created_at),
        started_at=_whole(job.started_at),
        completed_at=_whole(job.finished_at) if is_done else None,
        expires_at=_whole(expires_at),
        **values,
        input=Input(name=job.photo_name, sha256=job.photo_sha256) if job.photo else None,
        seed=job.seed,
        priority=job.priority,
        place=place,
        held=held,
        eta_seconds=None if eta_seconds is None else round(max(0.0, eta_seconds), 3),
        step=step,
        rank=rank,
        error=None if job.error is None else error_body(job.error),
        proof=job.proof,
        proof_reason=job.proof_reason,
        callback=_callback_of(job),
    )


def _callback_of(job: Job) -> Callback | None:
    if job.callback_url is None or job.state is JobState.CANCELLED:
        return None
    settled: Literal["delivered", "failed"] = "failed" if job.callback_error else "delivered"
    return Callback(
        url=job.callback_url,
        status=settled if job.callback_due is None else "pending",
        attempts=job.callback_attempts,
        error=job.callback_error,
    )


def error_body(record: dict[str, Any]) -> ErrorBody:
    """What `errors.error_to_dict` wrote, by the names of the API, without folders of the server."""
    shown = redact_all(record, without_folders)
    return ErrorBody(
        code=shown.get("type") or "SvdppError",
        message=str(shown.get("message", "")),
        hint=str(shown.get("hint", "")),
        details=dict(shown.get("details") or {}),
    )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
