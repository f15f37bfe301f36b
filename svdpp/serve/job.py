"""What the queue stores: the Job, which is one requested clip, and the servers that share it."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from svdpp.config import SamplingConfig
from svdpp.config.limits import LARGE_MEGAPIXELS

#: The folders of files in the data folder.
PHOTOS, CLIPS, LATENTS = "photos", "clips", "latents"

EngineState = Literal["starting", "ready", "restarting", "closing"]
Proof = Literal["none", "running", "equal", "different", "failed"]


class JobState(StrEnum):
    """The states of a job."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether no other state follows."""
        return self not in (JobState.QUEUED, JobState.IN_PROGRESS)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One requested clip. Times are unix seconds.

    Args:
        model: that makes it, by the name that clients know.
        weights: fingerprint or commit of the model's weights; empty if they never change.
        sampling: resolved, so that the frame count is known.
        photo: name of the file in the folder of images; empty for a clip from text alone.
        photo_name: the file name that the client gave, for people only.
        photo_pixels: width times height; 0 without an image.
        videos: SHA-256 of the further videos that the family takes, by name.
        started_at: when the ranks got it last.
        server: id of the server that has claimed it, or has ended it.
        token: counts the claims, if servers share the queue; else 0.
        step: how many steps are done, as its server said last.
        attempts: how often ranks have died during this clip.
        promised_seconds: the ETA that the client was given, from `created_at`.
        error: why it failed; see `errors.error_to_dict`.
        metadata: the clip's JSON once it is completed.
        proof: whether the clip was compared with one device; `failed`: it could not be.
        callback_url: where a webhook goes when it is completed or failed.
        callback_due: when to try next; None once the webhook is delivered or given up.
        callback_attempts: how often it was tried.
        callback_error: of the last try; None if that delivered it.
    """

    id: str
    owner: str = ""
    model: str = ""
    weights: str = ""
    seed: int
    sampling: SamplingConfig
    photo: str = ""
    photo_name: str = ""
    photo_sha256: str = ""
    photo_pixels: int = 0
    videos: dict[str, str] = field(default_factory=dict)
    prompt: str | None = None
    negative_prompt: str | None = None
    created_at: float
    priority: int = 0
    idempotency_key: str | None = None
    state: JobState = JobState.QUEUED
    server: str | None = None
    token: int = 0
    step: int = 0
    started_at: float | None = None
    finished_at: float | None = None
    attempts: int = 0
    cancel_asked: bool = False
    promised_seconds: float | None = None
    error: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    proof: Proof = "none"
    proof_reason: str | None = None
    callback_url: str | None = None
    callback_due: float | None = 0.0
    callback_attempts: int = 0
    callback_error: str | None = None

    @property
    def kind(self) -> str:
        """Equal for jobs that the same servers can make."""
        return self.weights or self.model

    @property
    def has_large_image(self) -> bool:
        """Whether other jobs go first while its image is prepared."""
        return self.photo_pixels > LARGE_MEGAPIXELS * 10**6

    def clip_in(self, folder: Path) -> Path:
        """The clip's file in a data folder; it may not exist. Its JSON has the suffix `.json`."""
        return clip_file(folder, self.id, self.token)

    def photo_in(self, folder: Path) -> Path | None:
        """The image's file in a data folder; it may not exist."""
        return folder / PHOTOS / self.photo if self.photo else None

    def videos_in(self, folder: Path) -> dict[str, Path]:
        """The files of its further videos, by name."""
        return {name: folder / PHOTOS / f"{self.id}.{name}" for name in self.videos}

    def uploads_in(self, folder: Path) -> list[Path]:
        """The files of the image and the videos."""
        photo = self.photo_in(folder)
        return [*([photo] if photo else []), *self.videos_in(folder).values()]


@dataclass(frozen=True, kw_only=True)
class FleetServer:
    """One server, as it has described itself `seen_seconds` ago: it lives if a lease is longer.

    It has the clips of its `claims`, and could take as many as are `free`; `weights` as in `Job`.
    """

    id: str
    host: str
    version: str
    model: str
    weights: str
    sizes: list[str]
    ranks: int
    state: EngineState
    free: int
    claims: int
    seen_seconds: float
    is_live: bool = True

    @property
    def kind(self) -> str:
        """Equal for servers whose clips are equal."""
        return self.weights or self.model


def clip_file(folder: Path, id: str, token: int) -> Path:
    """The file that the claim of a token writes.

    So the transaction that completes the job also publishes the file, which is on the disk by then,
    and what a server writes that has lost its claim is never read.
    """
    return folder / CLIPS / (f"{id}-{token}.mp4" if token else f"{id}.mp4")


def new_id() -> str:
    """A new job's id, which cannot be guessed."""
    return f"video_{secrets.token_hex(16)}"


def seed_of(requested: int | None, owner: str, idempotency_key: str | None) -> int:
    """The requested seed, else a drawn one; the same one for the same idempotency key."""
    if requested is not None:
        return requested
    if idempotency_key is None:
        return secrets.randbits(32)
    digest = hashlib.sha256(f"{owner}\0{idempotency_key}".encode()).digest()
    return int.from_bytes(digest[:4])
