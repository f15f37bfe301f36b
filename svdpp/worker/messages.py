"""Messages between the ranks and the parent process, each a JSON object.

Fields named `error` contain the result of `errors.error_to_dict`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, BaseModel, BeforeValidator, ConfigDict, Field

from svdpp.config import ClipRequest, sampling_from
from svdpp.plan.actions import Action

#: Cause of a rank's wait: an image that is not prepared yet, a packet that has not arrived, a slow
#: receiver (`send`), or the disk (`writer`).
WaitCause = Literal["image", "packet", "send", "writer"]


def _parse_text(value: object) -> object:
    return Action.parse(value) if isinstance(value, str) else value


#: Action of a rank. JSON messages contain it as a list of its fields. Tests also write it as text,
#: such as `DENOISE c0 2:4`.
ActionField = Annotated[Action, BeforeValidator(_parse_text)]


def _parse_sampling(values: Any) -> Any:
    """Replace the sampling parameters in a request's JSON by an instance of their family's class.

    The field's type is no union of all these classes: pydantic would take 0.1 s in each process to
    build the union's schema, and would try one class after the other for each message.
    """
    match values:
        case {"sampling": {"family": _} as sampling}:
            return {**values, "sampling": sampling_from(sampling)}
        case {"sampling": dict()}:
            raise ValueError("sampling parameters need a family")
    return values


#: Request for a clip. JSON messages contain the sampling parameters as an object of their fields.
RequestField = Annotated[ClipRequest, BeforeValidator(_parse_sampling)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Return the message as ASCII JSON, with the name of its class as `kind`.

        Python's JSON encoder is used, because it escapes bytes of file names that are not UTF-8,
        which pydantic's encoder rejects.
        """
        return json.dumps({"kind": type(self).__name__, **self.model_dump(mode="json")}).encode()


class ClipJob(_Message):
    """Request and metadata of one clip, for the ranks that make the clip."""

    clip: int
    request: RequestField
    """Request for the clip. If it has sampling parameters, all of them have values: the model's
    defaults have been filled in."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Fields for the clip's JSON; empty for ranks that do not finish the clip."""


class ClipBatch(_Message):
    """Command to a rank to make further clips with consecutive indices.

    Each rank gets all clips, even clips of which it runs no step, because a rank's actions depend
    on the routes of neighbouring clips. Each rank computes its own actions (`worker.routes`).
    """

    jobs: tuple[ClipJob, ...]


class PrepareImage(_Message):
    """Command to a rank to prepare the images of a clip that a later `ClipBatch` will contain."""

    request: RequestField


class Stop(_Message):
    """Command to a rank to stop, sent twice: first to finish all work, then to end the process."""


class Cancel(_Message):
    """Command to a rank to skip the remaining work on a cancelled clip."""

    clip: int


class Event(_Message):
    """Base class of the messages that a rank sends to the parent."""


class Started(Event):
    """Report of the rank's device and conditions, before the rank loads the model."""

    device: str
    uuid: str | None
    """UUID of the rank's GPU; None on the CPU."""
    conditions: dict[str, Any]
    """Conditions on which the bits of clips depend; see `worker.device.conditions_of`."""


class Heartbeat(Event):
    """Report that a rank is alive, and what it does.

    A separate thread sends it every second. It is also sent at once when the rank begins another
    action or another phase of its start, and when it begins or stops waiting.
    """

    action: ActionField | None = None
    """Current action of the rank; None between actions."""
    step: int = -1
    """Index of the current step of a DENOISE; -1 during other actions."""
    waiting: bool = False
    """Whether the rank waits for a packet, a slow receiver, an image or the disk. During the start
    of the ranks: whether the rank waits for other ranks."""
    writing: bool = False
    """Whether a writer thread has a clip or a latent checkpoint to write."""
    memory_bytes: int | None = None
    """Bytes of tensors on CUDA, or of the resident set on the CPU. None: the rank has no device
    yet."""
    phase: str = ""
    """Phase of the rank's start, such as "loading the model"; empty once the rank is ready for
    work."""
    peer: int = -1
    """Rank to which this rank is opening a link during the start; -1: no link is being opened."""


class RankStats(Event):
    """Sample of a rank's process and GPU for monitoring, sent every second by a separate thread."""

    sent_bytes: int
    """Bytes of tensors (packets of clips, predictions, frames) sent to other ranks since the
    start."""
    received_bytes: int
    """Bytes of tensors received from other ranks since the start."""
    resident_bytes: int
    """Bytes of the process's resident set."""
    allocated_bytes: int | None = None
    """Bytes of tensors on the GPU; None on the CPU."""
    reserved_bytes: int | None = None
    """Bytes that torch's allocator holds on the GPU, including its cache; None on the CPU."""
    peak_reserved_bytes: int | None = None
    """Highest value of `reserved_bytes` so far; None on the CPU."""
    gpu_load: float | None = None
    """Fraction of time in which a kernel ran on the GPU, in NVML's last sampling period, 0 to 1;
    None without NVML."""
    gpu_memory_bytes: int | None = None
    """Bytes in use on the GPU by all processes; None without NVML."""
    gpu_watts: float | None = None
    """Power draw of the GPU in watts; None without NVML."""


class Joined(Event):
    """Report that the rank's links are open and the rank is ready for work."""

    device: str
    """Name of the device, such as `cuda:1`."""
    load_seconds: float
    """Seconds that loading the model took."""
    device_name: str = ""
    """Name of the GPU, such as "NVIDIA H200"; empty on the CPU."""
    clock_ahead: float = 0.0
    """Seconds by which the monotonic clock of the rank's host is ahead of the clock of rank 0's
    host."""


class StepDone(Event):
    """Report that a rank has finished one denoising step, with the step's duration."""

    clip: int
    step: int
    seconds: float
    """Seconds that the step took on the device."""


class ActionDone(Event):
    """Report that a rank has finished one ENCODE, DENOISE, DECODE or RECV_FRAMES.

    Start and end are in seconds on the monotonic clock of the rank's host.
    """

    action: ActionField
    start: float
    end: float
    waited: float
    """Seconds that the rank has waited since its previous `ActionDone`."""
    waits: dict[WaitCause, float] = Field(default_factory=dict)
    """Seconds of `waited` for each cause."""


class TransferDone(Event):
    """Report of one packet that was received or sent; see `comm.transport.Transfer`."""

    direction: Literal["recv", "send"]
    clip: int
    next_step: int
    peer: int
    num_bytes: int
    seconds: float
    waited: float = 0.0
    end: float


class ClipDone(Event):
    """Report of a finished clip. The clip's file, if one was requested, has been written."""

    clip: int
    metadata: dict[str, Any]
    """Metadata of the clip, as in its JSON."""
    write_seconds: float = 0.0
    """Seconds that the writer thread needed for hashes, video file and JSON."""


class PromptTruncated(Event):
    """Report that a clip's prompt has too many tokens, so the model ignores the prompt's end."""

    clip: int
    text: str
    """End of the prompt, which the model ignores."""


class CheckpointLost(Event):
    """Report that a latent checkpoint cannot be written. The clip continues without it.

    After a failed write, further failures are not reported until a write has succeeded.
    """

    error: dict[str, Any]


class StoredTensor(Event):
    """File of tensors to keep for verification, from a rank that may be on another host."""

    name: str
    """Name of the file in the tensor store."""
    data: Base64Bytes


class ImageReady(Event):
    """Report that a rank has prepared the image of a clip that will be submitted later, or failed.

    If it failed, the clip's encode reports the error.
    """

    image: str | None
    """Path of the image; None if the clip has no image."""
    seconds: float | None
    """Seconds that preparing the image took; None if it failed."""


class ClipFailed(Event):
    """Report of an error that makes one clip fail. The rank continues with other clips."""

    clip: int
    error: dict[str, Any]


class ClipDropped(Event):
    """Report that all ranks have dropped a failed or cancelled clip.

    The rank at the end of the clip's route sends this event.
    """

    clip: int


class Failed(Event):
    """Report of a rank about the error that ends this rank."""

    error: dict[str, Any]
    traceback: str
    action: ActionField | None
    """Action that failed; None between actions."""
    step: int
    """Index of the step at which a DENOISE failed; -1 for other actions."""


class Finished(Event):
    """Report that a rank has finished all work after `Stop`, and has received all packets.

    A rank that exits without this report has failed.
    """

    allocated_bytes: int | None = None
    """Peak of the bytes of tensors on the GPU; None on the CPU."""
    reserved_bytes: int | None = None
    """Peak of the bytes that torch's allocator reserved on the GPU; on the CPU, peak of the
    resident set. None: not measured."""


_CLASSES = {kind.__name__: kind for base in (_Message, Event) for kind in base.__subclasses__()}


def parse(message: bytes) -> Any:
    """Parse the bytes of a message between a rank and the parent, as its `to_bytes` returns them.

    Returns:
        Command (such as `ClipBatch`) or event (such as `ClipDone`).

    Raises:
        ValueError: The text is not JSON, or a field is missing, unknown or of another type.
        KeyError: The JSON names no known message type.
    """
    values = json.loads(message)
    return _CLASSES[values.pop("kind")].model_validate(values)


def describe_position(action: Action | None, step: int) -> str:
    """Return a rank's position for error messages, such as " at clip 3, step 7 (...)".

    Args:
        action: Current action; None: the rank is between actions, and the result is empty.
        step: Index of the current step of a DENOISE; -1: the action has no steps.
    """
    if action is None:
        return ""
    at = f", step {step}" if step >= 0 else ""
    return f" at clip {action.clip}{at} ({action})"
