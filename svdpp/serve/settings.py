"""Settings of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from svdpp.config import PipelineConfig
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS
from svdpp.media.images import MAX_PIXELS
from svdpp.serve.middleware import DEFAULT_MAX_UPLOAD_BYTES


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server: configuration of its pipeline, data folder, and limits."""

    config: PipelineConfig
    folder: Path
    """Data folder, with the queue and all files."""
    sizes: tuple[tuple[int, int], ...]
    """Frame sizes that clients may request, each width and height in pixels."""
    max_open: int
    """Maximum number of jobs that are queued or in progress."""
    max_steps: int = MAX_STEPS
    """Maximum number of denoising steps of a clip."""
    max_frames: int = MAX_FRAMES
    """Maximum number of frames of a clip."""
    upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES
    """Maximum size in bytes of the body of a request for one clip."""
    max_pixels: int = MAX_PIXELS
    """Maximum number of pixels of an uploaded image."""
    keep_seconds: float | None = None
    """Maximum seconds for which a job and its files are kept after the job has ended; None: no
    limit."""
    keep_bytes: int | None = None
    """Maximum total size in bytes of the files of all jobs. If it is exceeded, the oldest finished
    jobs are removed. None: no limit."""
    verifies_when_idle: bool = False
    """Whether the server verifies finished clips while its ranks have no work."""
    adopts: bool = False
    """Whether the server starts although its data folder or store has files of another queue or
    program. False: such files cause an error at the start."""
    callback_hosts: Sequence[str] = ()
    """Hosts that may get webhooks, such as `example.org` or `example.org:8443`."""
    callback_secrets: Sequence[bytes] = ()
    """Secrets with which webhooks are signed."""
    queue_url: str | None = None
    """URL of the PostgreSQL database that servers share; None: a file in `folder`."""
    store_url: str | None = None
    """URL of the store of files that servers share; None: files are in `folder`."""
    lease_seconds: float = 30.0
    """Seconds without a renewal after which a server's claim of a job ends. Used only with
    `queue_url`."""
