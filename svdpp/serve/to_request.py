"""From a job to what the ranks get: the clip's request, its metadata and its files."""

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
from svdpp.serve.job import CLIPS, LATENTS, PHOTOS, Job
from svdpp.worker import latent_checkpoints
from svdpp.worker.clip_metadata import clip_metadata, latents_key, weights_identity


@dataclass(frozen=True)
class ClipToMake:
    """One job as the ranks get it."""

    request: ClipRequest
    metadata: dict[str, Any]

    def finished_metadata(self) -> dict[str, Any] | None:
        """The JSON of the clip, if an earlier server finished it but could not say so."""
        output = self.request.output
        if output is None or not Path(output.path).exists():
            return None
        try:
            return clip_as_asked(output, self.metadata)
        except (RequestError, InputError, OutputError):
            return None  # it is written again


class ToRequest:
    """Turns jobs into requests. Any thread may call it.

    The dummy model has no checkpoint and writes no files.
    """

    def __init__(self, config: PipelineConfig, checkpoint: Checkpoint | None, folder: Path) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._folder = folder.absolute()
        self.latents_folder = self._folder / LATENTS

    def __call__(self, job: Job) -> ClipToMake:
        """What the ranks get for `job`, which continues from its latest latent checkpoint."""
        metadata, key = self._metadata_and_key(job)
        photo = None if self._checkpoint is None else self._photo(job)
        request = ClipRequest(
            seed=job.seed,
            image=None if photo is None else str(photo.path),
            image_sha256=None if photo is None else photo.sha256,
            prompt=job.prompt,
            negative_prompt=job.negative_prompt,
            output=None if self._checkpoint is None else self._output(job),
            latents_key=key,
            done_steps=max(latent_checkpoints.saved_steps(self.latents_folder, key), default=0),
            sampling=job.sampling,
        )
        return ClipToMake(request, metadata)

    def forget(self, job: Job) -> None:
        """Removes the job's latent checkpoints."""
        with contextlib.suppress(SvdppError):  # what the ranks cannot make has none
            latent_checkpoints.prune(self.latents_folder, self._metadata_and_key(job)[1])

    def forget_all(self) -> None:
        """Removes all latent checkpoints; only if no job is unfinished."""
        for key in latent_checkpoints.saved_keys(self.latents_folder):
            latent_checkpoints.prune(self.latents_folder, key)

    def _photo(self, job: Job) -> Photo | None:
        path = self._folder / PHOTOS / job.photo
        return Photo(path, job.photo_sha256, 0, 0) if job.photo else None

    def _output(self, job: Job) -> OutputConfig:
        return OutputConfig(path=str(self._folder / CLIPS / f"{job.id}.mp4"))

    def _metadata_and_key(self, job: Job) -> tuple[dict[str, Any], str]:
        """The clip's metadata, and the key of its latent checkpoints.

        The key holds the job's id: two jobs for the same clip must not remove each other's.
        """
        metadata: dict[str, Any] = {}
        identity = json.dumps([job.seed, asdict(job.sampling)], sort_keys=True)
        if self._checkpoint is not None:
            made_from = ClipInput(self._photo(job), job.prompt, job.negative_prompt)
            config = resolved_for(job.sampling, self._config, self._checkpoint)
            output = self._output(job)
            metadata = clip_metadata(made_from, job.seed, output, config, self._checkpoint)
            identity = latents_key(metadata, weights_identity(self._checkpoint))
        return metadata, hashlib.sha256(f"{job.id} {identity}".encode()).hexdigest()
