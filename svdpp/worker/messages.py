"""The messages between ranks and their parent, one JSON text each.

For the form of an `error` see `errors.error_to_dict`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, BaseModel, BeforeValidator, ConfigDict, Field

from svdpp.config import ClipRequest
from svdpp.plan.actions import Action

#: Cause of a rank's wait: an image, a packet, a receiver that is behind (`send`), or the disk.
WaitCause = Literal["image", "packet", "send", "writer"]


def _parse_text(value: object) -> object:
    return Action.parse(value) if isinstance(value, str) else value


#: An action, in JSON a list of its fields; tests also write it as text.
ActionField = Annotated[Action, BeforeValidator(_parse_text)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Return the message as JSON in ASCII, with the name of its class.

        pydantic's own encoder refuses file names that are not UTF-8; Python's escapes their bytes.
        """
        return json.dumps({"kind": type(self).__name__, **self.model_dump(mode="json")}).encode()


class ClipJob(_Message):
    """Request and metadata of one clip, for the ranks that make it."""

    clip: int
    request: ClipRequest
    """Its sampling parameters are resolved, if it has any."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Request as the clip's JSON records it; only the rank that finishes the clip gets it."""


class ClipBatch(_Message):
    """Message from the parent: further clips, with consecutive indices.

    Each rank gets all of them, also those that it does not visit, and finds its own actions
    (`worker.routes`): the actions of a rank depend on the routes of the clips around.
    """

    jobs: tuple[ClipJob, ...]


class PrepareImage(_Message):
    """Message from the parent: prepare the images of a clip that comes later, in a `ClipBatch`."""

    request: ClipRequest


class Stop(_Message):
    """Message from the parent: no more work follows; a second one: all ranks may end."""


class Cancel(_Message):
    """Message from the parent: skip what is left of a clip."""

    clip: int


class Event(_Message):
    """Message of a rank to its parent."""


class Started(Event):
    """Device and conditions of the rank, sent before it loads the model."""

    device: str
    uuid: str | None
    """UUID of the GPU; None on the CPU."""
    conditions: dict[str, Any]
    """See `worker.device.conditions_of`."""


class Heartbeat(Event):
    """Sign of life, sent every second by a separate thread, whatever the rank is doing."""

    action: ActionField | None = None
    """The current action; None between actions."""
    step: int = -1
    """The current step; -1 outside of DENOISE."""
    waiting: bool = False
    """Whether the rank waits for a packet rather than computes."""
    writing: bool = False
    """Whether a writer thread has a clip or a latent checkpoint to write."""
    memory_bytes: int | None = None
    """On CUDA the bytes in tensors, on the CPU the resident set; None before the rank has one."""
    phase: str = ""
    """Phase of the start, in words; empty once the rank has joined."""
    peer: int = -1
    """Rank to which it opens a link during the start; -1: none."""


class RankStats(Event):
    """A sample for monitoring, sent every second by a thread of its own; no sign of progress."""

    sent_bytes: int
    """Bytes of tensors sent to other ranks since the links are open: packets of clips, predictions
    of a pair, frames."""
    received_bytes: int
    resident_bytes: int
    """Resident set of the process."""
    allocated_bytes: int | None = None
    """Bytes in tensors on the GPU; None on the CPU, as the next two."""
    reserved_bytes: int | None = None
    """Bytes that torch's allocator holds on the GPU, with its cache."""
    peak_reserved_bytes: int | None = None
    gpu_load: float | None = None
    """Part of the last sampling period of NVML in which a kernel ran, 0 to 1; None without NVML, as
    the next two."""
    gpu_memory_bytes: int | None = None
    """Memory in use on the GPU, by all processes."""
    gpu_watts: float | None = None


class Joined(Event):
    """Report that the rank's links are open, and that it is ready for work."""

    device: str
    load_seconds: float
    device_name: str = ""
    """Name of the GPU, such as "NVIDIA H200"; empty on the CPU."""
    clock_ahead: float = 0.0
    """Seconds by which the rank's monotonic clock is ahead of rank 0's, on another host."""


class StepDone(Event):
    """Time of one denoising step that is done."""

    clip: int
    step: int
    seconds: float


class ActionDone(Event):
    """Times of one ENCODE, DENOISE or DECODE, by the machine's monotonic clock, in seconds."""

    action: ActionField
    start: float
    end: float
    waited: float
    """Seconds of waiting since the previous action: for a packet, or for a slow neighbour."""
    waits: dict[WaitCause, float] = Field(default_factory=dict)
    """`waited` by its causes."""


class TransferDone(Event):
    """One packet that has been received or sent; see `comm.transport.Transfer`."""

    direction: Literal["recv", "send"]
    clip: int
    next_step: int
    peer: int
    num_bytes: int
    seconds: float
    waited: float = 0.0
    end: float


class ClipDone(Event):
    """Metadata of a clip that is finished, and whose file, if requested, is written."""

    clip: int
    metadata: dict[str, Any]
    write_seconds: float = 0.0
    """Seconds of the writer's thread for hashes, video file and JSON."""


class PromptTruncated(Event):
    """End of a prompt that is longer than the model reads."""

    clip: int
    text: str
    """The end that is cut off."""


class CheckpointLost(Event):
    """Error of a rank that cannot write latent checkpoints; its clips go on.

    Sent for the first failure, and again only after a write has succeeded.
    """

    error: dict[str, Any]


class StoredTensor(Event):
    """Tensor to keep for verification, from a rank that may be on another host than rank 0."""

    name: str
    """Name of the file in the tensor store."""
    data: Base64Bytes


class ImageReady(Event):
    """Image of a clip that is submitted later, which the rank has prepared in `seconds`."""

    image: str | None
    seconds: float


class ClipFailed(Event):
    """Error of a clip that is lost; the rank goes on with the others."""

    clip: int
    error: dict[str, Any]


class ClipDropped(Event):
    """Lost or cancelled clip that all ranks have let go of, the last rank last."""

    clip: int


class Failed(Event):
    """Error of a rank that cannot go on, and ends."""

    error: dict[str, Any]
    traceback: str
    action: ActionField | None
    step: int


class Finished(Event):
    """End of a rank's work after `Stop`: it has also received every packet sent to it.

    A rank that ends without it has failed.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    """The peaks of bytes in tensors and of all bytes; see `worker.device.peak_bytes`."""


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
    """Return a rank's position in words; empty outside of actions.

    Args:
        action: Action that the rank performs; None: none.
        step: Step of a DENOISE; -1: none.
    """
    if action is None:
        return ""
    at = f", step {step}" if step >= 0 else ""
    return f" at clip {action.clip}{at} ({action})"
