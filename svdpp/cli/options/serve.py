"""The options of the service: address, data folder, keys, limits, retention."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from svdpp.cli.command import COSTS, RECOVERY, SERVICE, VIDEO
from svdpp.cli.options.files import ImageOptions
from svdpp.cli.options.pipeline import PipelineOptions
from svdpp.config import SamplingConfig
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS, check_seconds, is_number, shown
from svdpp.errors import RequestError

_MAX_UPLOAD_MB = 256  # as media.image reads at most
_MAX_SIZES = 32
_DATABASES = ("postgresql://", "postgres://")


def _most(what: str, most: int) -> Any:
    text = f"{what} that a request may ask for."
    return SERVICE.setting("N", text, default=most, between=(1, most))


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PipelineOptions, ImageOptions):
    """The options of the pipeline; where the service listens, what it keeps, and limits."""

    host: str = SERVICE.setting(
        "HOST",
        "Address to listen on. One that other machines reach needs --api-key-file.",
        default="127.0.0.1",
    )
    port: int = SERVICE.setting(
        "PORT", "Port; 0 takes a free one.", default=8000, between=(0, 65535)
    )
    data: Path = SERVICE.setting(
        "DIR",
        "Folder of queue, images and clips; a new start with it goes on.",
        default=Path("svdpp-data"),
    )
    queue: str | None = SERVICE.setting(
        "URL",
        "PostgreSQL database of a queue that several servers share, such as "
        "postgresql://svdpp@db/svdpp; all of them share the --data folder, too, or --files.",
        shown="a file in --data",
    )
    files: str | None = SERVICE.setting(
        "URL",
        "With --queue: the store that all its servers reach, such as s3://bucket/prefix; then each "
        "has a --data folder of its own.",
        shown="the --data folder",
    )
    lease: float = SERVICE.setting(
        "SECONDS",
        "With --queue: other servers take over the clips of one that has said nothing for this "
        "long.",
        default=30.0,
    )
    adopt: bool = SERVICE.switch(
        "Start a new queue in a --data folder that has other files; they are left alone."
    )
    api_key_file: Path | None = SERVICE.setting(
        "FILE",
        "Serve only requests with a key in this file, each its own clips.",
        shown="no keys: this machine only",
    )
    new_key: str | None = SERVICE.setting(
        "NAME",
        "Add the hash of a new API key to --api-key-file, print the key, and end.",
        shown="start the server",
    )
    callback_hosts: list[str] | None = SERVICE.setting(
        "HOST[:PORT]",
        "Let requests name a callback_url of this host, repeatable; without a port, that of the "
        "URL's scheme. An address that is not public is allowed only by itself. Needs "
        "--callback-secret-file.",
        shown="none",
    )
    callback_secret_file: Path | None = SERVICE.setting(
        "FILE", "Sign webhooks with the secrets in this file, each whsec_ and base64."
    )
    max_queue: int = SERVICE.setting(
        "N",
        "Clips that may wait or be made; more are told to come again.",
        default=1000,
        between=(1, 100_000),
    )
    max_upload_mb: int = SERVICE.setting(
        "MIB", "Largest image, in MiB.", default=32, between=(1, _MAX_UPLOAD_MB)
    )
    max_steps: int = _most("Steps", MAX_STEPS)
    max_frames: int = _most("Frames", MAX_FRAMES)
    keep_days: float | None = SERVICE.setting(
        "DAYS", "Remove finished clips, with their rows, after this time.", shown="never"
    )
    keep_gb: float | None = SERVICE.setting(
        "GB", "Remove the oldest finished clips beyond this size.", shown="no limit"
    )
    verify_when_idle: bool = SERVICE.switch(
        "Make finished clips again on one device while nothing waits, the newest first, "
        "and compare them bit by bit."
    )
    sizes: str | None = VIDEO.setting("WxH,WxH", "Further sizes, such as 768x448.", shown="none")
    time_scale: float | None = COSTS.setting(
        "X",
        "For tests with --model dummy: make it sleep for the time of --costs times X.",
        shown="no sleep",
    )
    grace: float = RECOVERY.setting(
        "SECONDS",
        "On SIGTERM, finish the clips in progress within this time; the others continue "
        "from their latent checkpoints at the next start.",
        default=30.0,
    )
    heartbeat_timeout: float = RECOVERY.setting(
        "SECONDS",
        "Start the ranks again if one sends no heartbeat, due every second, for this long.",
        default=15.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("--lease", self.lease)
        if self.queue is not None and not self.queue.startswith(_DATABASES):
            raise RequestError("--queue takes a URL such as postgresql://svdpp@db/svdpp")
        if self.files is not None and (self.queue is None or "://" not in self.files):
            raise RequestError("--files takes a URL such as s3://bucket/prefix, and needs --queue")
        if self.grace:
            check_seconds("--grace", self.grace)
        for name, value in (("--keep-days", self.keep_days), ("--keep-gb", self.keep_gb)):
            if value is not None and not (is_number(value) and value > 0):
                raise RequestError(f"{name} must be a finite number above 0, got {shown(value)}")

    def check_own(self, sampling: SamplingConfig) -> None:
        """Refuses limits that the server's own defaults, resolved, are beyond."""
        steps = sampling.num_inference_steps
        owns = ("steps", self.max_steps, steps), ("frames", self.max_frames, sampling.frames)
        for name, most, own in owns:
            if own > most:
                raise RequestError(
                    f"--max-{name} {most} is less than the {own} {name} of a clip by default",
                    f"add --{name} {most} or less",
                )

    def all_sizes(self) -> tuple[tuple[int, int], ...]:
        """Width and height of the default size and of all others."""
        sampling = self.sampling_config()
        found = {(sampling.width, sampling.height): None}
        for part in (self.sizes or "").split(",") if self.sizes is not None else ():
            match = re.fullmatch(r"\s*(\d{1,5})x(\d{1,5})\s*", part, re.ASCII)
            if match is None:
                raise RequestError(
                    f"--sizes takes sizes such as 1024x576,768x448, got {self.sizes!r}"
                )
            width, height = int(match[1]), int(match[2])
            replace(sampling, width=width, height=height)  # checks them
            found[width, height] = None
        if len(found) > _MAX_SIZES:
            raise RequestError(f"--sizes names more than {_MAX_SIZES} sizes")
        return tuple(found)
