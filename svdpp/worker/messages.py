"""Owns what ranks and their parent say to each other: validated values, one JSON text each."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, TypeAdapter

from svdpp.config import ClipRequest
from svdpp.plan.actions import Action


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """The message as JSON.

        In ASCII, and not by pydantic: a file's name need not be UTF-8, and what Python has for its
        bytes goes over the wire as JSON's escapes alone.
        """
        return json.dumps(self.model_dump(mode="json")).encode()


class ClipJob(_Message):
    """One clip, as the ranks need to know it."""

    clip: int
    request: ClipRequest
    metadata: dict[str, Any] = Field(default_factory=dict)
    """What the clip's JSON says of the request; the decoding rank adds hashes and times."""


class Work(_Message):
    """Parent to rank: further actions, in the plan's own text, and clips to encode or deliver."""

    kind: Literal["work"] = "work"
    actions: tuple[str, ...]
    jobs: tuple[ClipJob, ...]
    latents_keys: dict[int, str] = Field(default_factory=dict)
    """By clip, for those whose packets are kept or were kept by an earlier run."""

    def parsed(self) -> list[Action]:
        """The actions as values."""
        return [Action.parse(text) for text in self.actions]


class Stop(_Message):
    """Parent to rank: there will be no more work."""

    kind: Literal["stop"] = "stop"


class Cancel(_Message):
    """Parent to rank: what is not done yet of a clip is not wanted any more."""

    kind: Literal["cancel"] = "cancel"
    clip: int


Command = Annotated[Work | Stop | Cancel, Field(discriminator="kind")]


class Started(_Message):
    """The rank has its device; sent before it loads anything."""

    kind: Literal["started"] = "started"
    device: str
    uuid: str | None
    """Of the GPU; None on the CPU."""
    conditions: dict[str, Any]
    """What bits depend on beside the request, see `worker.conditions`; the same on all ranks."""


class Heartbeat(_Message):
    """Sent every second by a thread of its own, whatever the rank is doing."""

    kind: Literal["heartbeat"] = "heartbeat"
    action: str = ""
    """The action under way; empty between actions."""
    step: int = -1
    """The step under way; -1 outside of DENOISE."""
    waiting: bool = False
    """Whether the rank waits for a packet rather than computes."""
    writing: bool = False
    """Whether a thread beside the work has a clip or a latent checkpoint to write."""
    phase: str = ""
    """Before `Joined`: what the rank is doing."""
    peer: int = -1
    """Before `Joined`: the rank to which it is opening a link; -1 if none."""


class Joined(_Message):
    """All ranks have met, and the rank is ready for work."""

    kind: Literal["joined"] = "joined"
    device: str
    load_seconds: float
    clock_ahead: float = 0.0
    """Seconds by which the rank's monotonic clock is ahead of rank 0's, on another host."""


class StepDone(_Message):
    """One denoising step is over."""

    kind: Literal["step"] = "step"
    clip: int
    step: int
    seconds: float


class ActionDone(_Message):
    """One ENCODE, DENOISE or DECODE is over. Times are of the machine's monotonic clock."""

    kind: Literal["action"] = "action"
    action: str
    start: float
    end: float
    waited: float
    """Seconds spent waiting since the action before: for a packet, or for a slow neighbour."""


class TransferDone(_Message):
    """One packet has been received or sent; see `comm.transport.Transfer`."""

    kind: Literal["transfer"] = "transfer"
    direction: Literal["recv", "send"]
    clip: int
    next_step: int
    peer: int
    num_bytes: int
    seconds: float
    """From the header to the last byte, as this end saw it."""
    waited: float = 0.0
    """Of a send: seconds before that, until the receiver took the header."""
    end: float


class ClipDone(_Message):
    """A clip is finished; where a file was asked for it is in its place."""

    kind: Literal["clip"] = "clip"
    clip: int
    metadata: dict[str, Any]


class DraftDone(_Message):
    """An approximation of a clip is in its place; the clip itself is still to come."""

    kind: Literal["draft"] = "draft"
    clip: int
    metadata: dict[str, Any]


class DraftLost(_Message):
    """A rank other than the first lost its way, or a draft cannot be written; the clip goes on."""

    kind: Literal["draft_lost"] = "draft_lost"
    clip: int
    error: dict[str, Any]
    """See `errors.error_to_dict`."""


class StoredTensor(_Message):
    """TensorStore for a verification, from a rank that may be on another host than rank 0."""

    kind: Literal["stored_tensor"] = "stored_tensor"
    name: str
    """Of the file."""
    data: Base64Bytes


class PhotoWanted(_Message):
    """The rank encodes a clip next whose photograph lies on rank 0's host, and this is another."""

    kind: Literal["photo_wanted"] = "photo_wanted"
    clip: int


class ClipFailed(_Message):
    """A clip is lost; the rank, and every other clip, goes on."""

    kind: Literal["clip_failed"] = "clip_failed"
    clip: int
    error: dict[str, Any]
    """See `errors.error_to_dict`."""


class Failed(_Message):
    """The rank cannot go on, and ends."""

    kind: Literal["failed"] = "failed"
    error: dict[str, Any]
    """See `errors.error_to_dict`."""
    traceback: str
    action: str
    step: int


class Finished(_Message):
    """The rank was told to stop and has nothing left to do. Without it a run has failed."""

    kind: Literal["finished"] = "finished"
    allocated_bytes: int | None = None
    """Peak of what tensors held; see `runtime.peak`."""
    reserved_bytes: int | None = None
    """Peak in all."""


Event = Annotated[
    Heartbeat
    | Started
    | Joined
    | StepDone
    | ActionDone
    | TransferDone
    | DraftDone
    | StoredTensor
    | PhotoWanted
    | DraftLost
    | ClipDone
    | ClipFailed
    | Failed
    | Finished,
    Field(discriminator="kind"),
]

_COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)
_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


def parse_command(message: bytes) -> Command:
    """A message from the parent; ValueError where it is none."""
    return _COMMANDS.validate_python(json.loads(message))


def parse_event(message: bytes) -> Event:
    """A message from a rank; ValueError where it is none."""
    return _EVENTS.validate_python(json.loads(message))
