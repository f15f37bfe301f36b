"""What a job asks of the ranks: its request, its metadata and its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from svdpp.config import ClipRequest, OutputConfig, PipelineConfig
from svdpp.driver.existing_outputs import clip_as_asked
from svdpp.driver.resolve import resolved_for
from svdpp.errors import InputError, OutputError, RequestError, SvdppError
from svdpp.media.image import Photo
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import Checkpoint
from svdpp.serve.job import Job
from svdpp.worker import latent_checkpoints
from svdpp.worker.clip_metadata import clip_metadata, latents_key, weights_identity


@dataclass(frozen=True)
class ClipOrder:
    """One job as the ranks get it; `key` is that of its latent checkpoints."""

    request: ClipRequest
    metadata: dict[str, Any]
    key: str


class ClipOrders:
    """Turns jobs into requests. Any thread may call it.

    The dummy model has no checkpoint and writes no files.
    """

    def __init__(self, config: PipelineConfig, checkpoint: Checkpoint | None, folder: Path) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._folder = folder.absolute()
        self.latents_folder = self._folder / "latents"

    def order(self, job: Job) -> ClipOrder:
        """The order for `job`, which continues from its latest latent checkpoint."""
        output = self._output(job)
        metadata = self._metadata(job, output)
        key = self._key(job, metadata)
        steps = latent_checkpoints.saved_steps(self.latents_folder, key)
        photo = None if self._checkpoint is None else self._photo(job)
        request = ClipRequest(
            seed=job.seed,
            image=None if photo is None else str(photo.path),
            image_sha256=None if photo is None else photo.sha256,
            prompt=job.prompt,
            negative_prompt=job.negative_prompt,
            output=output,
            latents_key=key,
            done_steps=max(steps, default=0),
            sampling=job.sampling,
        )
        return ClipOrder(request, metadata, key)

    def finished(self, order: ClipOrder) -> dict[str, Any] | None:
        """The JSON of the order's clip, if an earlier server finished it but could not say so."""
        output = order.request.output
        if output is None or not Path(output.path).exists():
            return None
        try:
            return clip_as_asked(output, order.metadata)
        except (RequestError, InputError, OutputError):
            return None  # it is written again

    def forget(self, job: Job) -> None:
        """Removes the job's latent checkpoints."""
        with contextlib.suppress(SvdppError):  # what the ranks cannot make has none
            key = self._key(job, self._metadata(job, self._output(job)))
            latent_checkpoints.prune(self.latents_folder, key)

    def forget_all(self) -> None:
        """Removes all latent checkpoints; only if no job is unfinished."""
        for key in latent_checkpoints.saved_keys(self.latents_folder):
            latent_checkpoints.prune(self.latents_folder, key)

    def _photo(self, job: Job) -> Photo | None:
        if not job.photo:
            return None
        return Photo(self._folder / "photos" / job.photo, job.photo_sha256, 0, 0)

    def _output(self, job: Job) -> OutputConfig | None:
        if self._checkpoint is None:
            return None
        return OutputConfig(path=str(self._folder / "clips" / f"{job.id}.mp4"))

    def _metadata(self, job: Job, output: OutputConfig | None) -> dict[str, Any]:
        if self._checkpoint is None or output is None:
            return {}
        made_from = ClipInput(self._photo(job), job.prompt, job.negative_prompt)
        config = resolved_for(job.sampling, self._config, self._checkpoint)
        return clip_metadata(made_from, job.seed, output, config, self._checkpoint)

    def _key(self, job: Job, metadata: dict[str, Any]) -> str:
        """The key of the job's latent checkpoints.

        It holds the job's id: two jobs for the same clip must not remove each other's checkpoints.
        """
        if self._checkpoint is None:
            about = json.dumps([job.seed, asdict(job.sampling)], sort_keys=True)
        else:
            about = latents_key(metadata, weights_identity(self._checkpoint))
        return hashlib.sha256(f"{job.id} {about}".encode()).hexdigest()
