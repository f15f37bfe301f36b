"""Messages between ranks and their parent, each a JSON object.

Fields called `error` are made by `errors.error_to_dict`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, BaseModel, BeforeValidator, ConfigDict, Field

from svdpp.config import ClipRequest
from svdpp.plan.actions import Action

#: Cause of a rank's wait: an image, a packet, a slow receiver (`send`), or the disk (`writer`).
WaitCause = Literal["image", "packet", "send", "writer"]


def _parse_text(value: object) -> object:
    return Action.parse(value) if isinstance(value, str) else value


#: Action, in JSON a list of its fields, or text as tests write it.
ActionField = Annotated[Action, BeforeValidator(_parse_text)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Return the message as JSON in ASCII, with the name of its class.

        Python's encoder is used, because it escapes the bytes of file names that are not UTF-8,
        which pydantic's encoder refuses.
        """
        return json.dumps({"kind": type(self).__name__, **self.model_dump(mode="json")}).encode()


class ClipJob(_Message):
    """Request and metadata of one clip, for the ranks that make it."""

    clip: int
    request: ClipRequest
    """Request of the clip; its own sampling parameters, if it has any, are resolved."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Fields for the clip's JSON; empty except for the rank that finishes the clip."""


class ClipBatch(_Message):
    """Command to make further clips, whose indices are consecutive.

    Each rank gets all clips, also those that do not visit it, and derives its own actions
    (`worker.routes`), which depend on the routes of neighbouring clips.
    """

    jobs: tuple[ClipJob, ...]


class PrepareImage(_Message):
    """Command to prepare the images of a clip that a later `ClipBatch` will have."""

    request: ClipRequest


class Stop(_Message):
    """Command to stop. After the first one no work follows; after the second the rank may end."""


class Cancel(_Message):
    """Command to skip the remaining work on a cancelled clip."""

    clip: int


class Event(_Message):
    """Base of the messages of a rank to its parent."""


class Started(Event):
    """Device and conditions of the rank, sent before it loads the model."""

    device: str
    uuid: str | None
    """UUID of the GPU; None on the CPU."""
    conditions: dict[str, Any]
    """Conditions on which bits depend; see `worker.device.conditions_of`."""


class Heartbeat(Event):
    """Sign of life of a rank, sent every second by a separate thread."""

    action: ActionField | None = None
    """Current action; None between actions."""
    step: int = -1
    """Current step; -1 outside of DENOISE."""
    waiting: bool = False
    """Whether the rank waits for a packet, an image or the disk."""
    writing: bool = False
    """Whether a writer thread has a clip or a latent checkpoint to write."""
    memory_bytes: int | None = None
    """Bytes in tensors on CUDA, resident set on the CPU; None before the rank has a device."""
    phase: str = ""
    """Phase of the start, in words; empty once the rank has joined."""
    peer: int = -1
    """Rank to which this rank opens a link during the start; -1: none."""


class RankStats(Event):
    """Sample for monitoring, sent every second by a separate thread. It does not show progress."""

    sent_bytes: int
    """Bytes of tensors sent to other ranks since the links are open: packets of clips, predictions
    of a pair, frames."""
    received_bytes: int
    """Bytes of tensors received from other ranks since the links are open."""
    resident_bytes: int
    """Bytes of the process's resident set."""
    allocated_bytes: int | None = None
    """Bytes in tensors on the GPU; None on the CPU."""
    reserved_bytes: int | None = None
    """Bytes that torch's allocator holds on the GPU, including its cache; None on the CPU."""
    peak_reserved_bytes: int | None = None
    """Peak of `reserved_bytes`; None on the CPU."""
    gpu_load: float | None = None
    """Fraction of NVML's last sampling period in which a kernel ran, 0 to 1; None without NVML."""
    gpu_memory_bytes: int | None = None
    """Bytes in use on the GPU by all processes; None without NVML."""
    gpu_watts: float | None = None
    """Power of the GPU in watts; None without NVML."""


class Joined(Event):
    """Report that the rank's links are open and that it is ready for work."""

    device: str
    """Name of the device, such as `cuda:1`."""
    load_seconds: float
    """Seconds for which the model was loaded."""
    device_name: str = ""
    """Name of the GPU, such as "NVIDIA H200"; empty on the CPU."""
    clock_ahead: float = 0.0
    """Seconds by which the monotonic clock of the rank's host is ahead of rank 0's."""


class StepDone(Event):
    """Report of one denoising step."""

    clip: int
    step: int
    seconds: float
    """Seconds of the step on the device."""


class ActionDone(Event):
    """Report of one ENCODE, DENOISE or DECODE. Times are seconds on the host's monotonic clock."""

    action: ActionField
    start: float
    end: float
    waited: float
    """Seconds that the rank waited since the previous action."""
    waits: dict[WaitCause, float] = Field(default_factory=dict)
    """Seconds of `waited` by cause."""


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
    """Report of a finished clip, whose file, if one was requested, is written."""

    clip: int
    metadata: dict[str, Any]
    """Metadata of the clip, as in its JSON."""
    write_seconds: float = 0.0
    """Seconds that the writer thread needed for hashes, video file and JSON."""


class PromptTruncated(Event):
    """Report of a prompt that is longer than the model reads."""

    clip: int
    text: str
    """End of the prompt, which the model ignores."""


class CheckpointLost(Event):
    """Report that latent checkpoints cannot be written; the clips go on.

    It is sent for the first failure, and again only after a write has succeeded.
    """

    error: dict[str, Any]


class StoredTensor(Event):
    """Tensor to keep for verification, from a rank that may be on another host than the parent."""

    name: str
    """Name of the file in the tensor store."""
    data: Base64Bytes


class ImageReady(Event):
    """Report that a rank has prepared the image of a clip that will be submitted later."""

    image: str | None
    """Path of the image; None if the clip has none."""
    seconds: float
    """Seconds that the preparation took."""


class ClipFailed(Event):
    """Report of an error that loses one clip. The rank goes on with other clips."""

    clip: int
    error: dict[str, Any]


class ClipDropped(Event):
    """Report from the last rank that all ranks have dropped a lost or cancelled clip."""

    clip: int


class Failed(Event):
    """Report of the error that ends a rank."""

    error: dict[str, Any]
    traceback: str
    action: ActionField | None
    """Current action; None between actions."""
    step: int
    """Current step; -1 outside of DENOISE."""


class Finished(Event):
    """Report that a rank's work has ended after `Stop`, all packets received.

    A rank that ends without this report has failed.
    """

    allocated_bytes: int | None = None
    """Peak bytes in tensors; see `worker.device.peak_bytes`."""
    reserved_bytes: int | None = None
    """Peak bytes of the rank's memory; see `worker.device.peak_bytes`."""


_CLASSES = {kind.__name__: kind for base in (_Message, Event) for kind in base.__subclasses__()}


def parse(message: bytes) -> Any:
    """Return the command or event that `to_bytes` wrote.

    Raises:
        ValueError: The text is not JSON, or a field is missing, unknown or of another type.
        KeyError: The JSON names no known message type.
    """
    values = json.loads(message)
    return _CLASSES[values.pop("kind")].model_validate(values)


def describe_position(action: Action | None, step: int) -> str:
    """Return a rank's position, such as " at clip 3, step 7 (...)"; empty between actions.

    Args:
        action: Current action; None: none.
        step: Current step of a DENOISE; -1: none.
    """
    if action is None:
        return ""
    at = f", step {step}" if step >= 0 else ""
    return f" at clip {action.clip}{at} ({action})"
