"""Admission checks for requested clips; converter of queued jobs to pipeline requests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from svdpp.config import ClipRequest, OutputConfig, PipelineConfig, SamplingConfig
from svdpp.config.pipeline import LAST_IMAGE, latents_key, reference_names
from svdpp.driver.clip_metadata import clip_metadata, weights_identity
from svdpp.driver.clips import ClipHandle, ClipProgress
from svdpp.driver.request_scheduler import RequestScheduler
from svdpp.driver.resolve import check_memory, memory_of_devices
from svdpp.errors import OutOfMemoryError, RequestError, SvdppError, pluralize
from svdpp.launch.gpus import visible_gpus
from svdpp.media.images import MediaFile
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.costs import CostModel
from svdpp.serve.job import LATENTS_FOLDER, Job
from svdpp.serve.loras import LoraCatalog
from svdpp.serve.store import FileStore
from svdpp.worker import tensor_files
from svdpp.worker.routes import resolve_clip_config

# Maximum number of results in each of the two caches of `Admission`.
_MAX_SHAPES = 256
# Seconds by which the preparation of a large image may exceed its estimated time. After that, the
# job is submitted although its image is not prepared. Jobs with small images never wait for the
# preparation.
_PREPARE_SECONDS = 60.0


class Admission:
    """Admission check: whether the ranks can make a clip. Any thread may call any method.

    The ranks need a route for the clip, which lists the ranks that run its stages and steps, and
    enough memory. The memory is not checked for clips that are no larger than the server's default.

    Args:
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of the model; None for the dummy model.
    """

    def __init__(self, config: PipelineConfig, checkpoint: Checkpoint | None) -> None:
        self._config = config
        self._checkpoint = checkpoint
        # Free GPU memory is read before the ranks start, because the ranks allocate most of it.
        self._free = {f"cuda:{gpu.index}": gpu.free_bytes for gpu in visible_gpus()}
        self._memory_error = functools.lru_cache(_MAX_SHAPES)(self._find_memory_error)
        self._route_error = functools.lru_cache(_MAX_SHAPES)(self._find_route_error)

    def check(self, sampling: SamplingConfig) -> None:
        """Raise an error unless the ranks have a route and enough memory for a requested clip.

        Raises:
            RequestError: No route through the ranks can make the clip.
            OutOfMemoryError: The clip needs more memory than a device has.
        """
        if (error := self._route_error(sampling)) is not None:
            raise RequestError(error.message, error.hint, details=error.details)
        self._check_memory(sampling)

    def no_route_reason(self, sampling: SamplingConfig) -> str | None:
        """Return why this server's ranks have no route for a queued clip; None if they have one.

        Memory was checked when the clip was requested. It is not checked again, because only the
        free memory at this server's start is known, and more memory may be free now.
        """
        error = self._route_error(sampling)
        return None if error is None else error.message

    def check_clip_inputs(self, sampling: SamplingConfig, request: ClipRequest) -> None:
        """Raise a `RequestError` if an input of a clip is missing, or is not accepted by the model.

        Raises:
            RequestError: A needed image, video or prompt is missing, or the model does not accept
                a given one.
        """
        if self._checkpoint is not None:
            self._checkpoint.check_request(sampling, request)

    def _find_route_error(self, sampling: SamplingConfig) -> RequestError | None:
        try:
            RequestScheduler(self._config, self._checkpoint).check_routes(sampling)
        except RequestError as error:
            return error
        return None

    def _check_memory(self, sampling: SamplingConfig) -> None:
        default = self._config.sampling
        is_no_larger = (
            sampling.width * sampling.height <= default.width * default.height
            and sampling.frames <= default.frames
            and (sampling.decode_chunk_size or 0) <= (default.decode_chunk_size or 0)
            and sampling.uses_guidance <= default.uses_guidance
            and sampling.num_references <= default.num_references
        )
        if is_no_larger or self._checkpoint is None:
            return
        if self._config.device == "cpu":
            config = resolve_clip_config(sampling, self._config, self._checkpoint)
            check_memory(config, self._checkpoint, self._config.layout.roles)
            return
        if (error := self._memory_error(_shape_only(sampling))) is not None:
            raise OutOfMemoryError(error.message, error.hint, details=error.details)

    def _find_memory_error(self, sampling: SamplingConfig) -> OutOfMemoryError | None:
        """Return an error if a clip does not fit in the GPUs' memory; None if the clip fits."""
        needs, has = memory_of_devices(
            self._config.model,
            sampling,
            self._config.device,
            self._config.world_size,
            lambda device: self._free.get(device, 0),
        )
        costs = CostModel(**needs)  # type: ignore[arg-type]
        for roles, gib in zip(self._config.layout.roles, has, strict=True):
            need = costs.peak_gib(roles)
            if need is not None and need > gib:
                width, height, frames = sampling.width, sampling.height, sampling.frames
                return OutOfMemoryError(
                    f"a clip of {pluralize(frames, 'frame')} of {width}x{height} needs "
                    f"{need:.1f} GiB on a GPU that has {gib:.1f} GiB",
                    "request fewer frames or a smaller size",
                    details={
                        "field": "num_frames",
                        "requested_bytes": int(need * 2**30),
                        "free_bytes": int(gib * 2**30),
                        "device": "cuda",
                        **{"frames": frames, "width": width, "height": height},
                    },
                )
        return None


#: Sampling parameters on which the memory of a clip depends. The memory also depends on the
#: guidance scale, whose name differs between models, so `_shape_only` adds it.
_SHAPE = (
    *("height", "width", "num_frames", "decode_chunk_size", "max_sequence_length"),
    *("from_image", "has_last_image", "num_references"),
)


def _shape_only(sampling: SamplingConfig) -> SamplingConfig:
    """Return the parameters on which a clip's memory depends, as a key for the cache.

    All other parameters have their defaults, so clips that need the same memory have equal keys.
    """
    names = {field.name for field in fields(sampling)}
    shape: dict[str, Any] = {name: getattr(sampling, name) for name in _SHAPE if name in names}
    scale = "guidance_scale" if "guidance_scale" in names else "max_guidance_scale"
    shape[scale] = 2.0 if sampling.uses_guidance else 1.0
    return type(sampling)(**shape)


@dataclass
class RunningClip:
    """Clip of a job that is in the pipeline, or whose large image the ranks still prepare."""

    job: Job
    request: ClipRequest
    """Request for the clip, as it is submitted to the pipeline."""
    metadata: dict[str, Any]
    handle: ClipHandle | None = None
    """Handle of the clip in the pipeline; None until the clip is submitted to the pipeline."""
    progressed_at: float = 0.0
    """Monotonic time at which the clip's progress last changed."""
    is_revoked: bool = False
    """Whether this server has lost its claim of the job, so that another server may already make
    the clip."""
    ranks_left: int = 0
    """Number of ranks that have not prepared the clip's large image yet."""
    prepared_at: float = 0.0
    """Monotonic time at which the clip's large image will probably be prepared, estimated from the
    time that the latest large image took."""

    @property
    def is_prepared(self) -> bool:
        """Whether the clip can be submitted: its image is prepared, or preparing takes too long."""
        return self.ranks_left <= 0 or time.monotonic() > self.prepared_at + _PREPARE_SECONDS

    @property
    def progress(self) -> ClipProgress:
        """Progress of the clip: its finished steps, and the rank that works on it.

        If the clip continues from a latent checkpoint, the steps before the checkpoint count as
        finished.
        """
        if self.handle is not None:
            return self.handle.progress
        return ClipProgress(self.request.done_steps, self.job.sampling.num_inference_steps)

    @property
    def has_started(self) -> bool:
        """Whether a rank has begun the clip."""
        return self.progress.rank is not None


class RequestBuilder:
    """Converter of queued jobs into requests for the pipeline. Any thread may call any method.

    Args:
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of the model; None for the dummy model, which writes no files.
        store: Files of the jobs.
    """

    def __init__(
        self, config: PipelineConfig, checkpoint: Checkpoint | None, store: FileStore
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._store = store
        self._loras = LoraCatalog(checkpoint)
        self.folder = store.folder
        self.latents_folder = self.folder / LATENTS_FOLDER
        # Latent checkpoints that the store has for this server's jobs. Each is a tuple: key of the
        # job's checkpoints, number of finished steps.
        self._published_latents: set[tuple[str, int]] = set()

    def __call__(self, job: Job) -> RunningClip:
        """Convert a job to a `RunningClip`, which continues from the latest latent checkpoint.

        Input files that are only in the store are fetched to the data folder.
        """
        for path in job.upload_paths(self.folder):
            self._store.fetch(path)
        metadata, key = self._metadata_and_key(job)
        self._fetch_latents(job, key)
        request = replace(
            self._clip_input(job).request(job.seed),
            output=None if self._checkpoint is None else self._output(job),
            latents_key=key,
            done_steps=self._steps_done(key),
            sampling=job.sampling,
            loras=tuple(file.lora for file in self._loras.files(job.loras)),
        )
        return RunningClip(job, request, metadata)

    def remove_latents(self, job: Job) -> None:
        """Remove a job's latent checkpoints."""
        # `_metadata_and_key` fails for a job that the ranks cannot make. Such a job has no
        # checkpoints.
        with contextlib.suppress(SvdppError):
            tensor_files.remove_checkpoints(self.latents_folder, self._metadata_and_key(job)[1])

    def remove_all_latents(self) -> None:
        """Remove the latent checkpoints of all jobs. Call this only if all jobs have ended."""
        for key, _ in tensor_files.list_checkpoints(self.latents_folder):
            tensor_files.remove_checkpoints(self.latents_folder, key)

    def publish_latents(self) -> None:
        """Copy this server's new latent checkpoints to the store, and delete old ones there.

        A checkpoint in the store is old if this server no longer has a local file of it.

        Raises:
            StorageUnavailableError: The store does not answer.
        """
        self._store.probe()
        # The set is copied before the folder is listed. In the opposite order, a checkpoint that
        # another thread fetches in between would be in the set but not in the listing, and would
        # be deleted from the store.
        published_latents = self._published_latents.copy()
        saved = tensor_files.list_checkpoints(self.latents_folder)
        for key, step in saved - self._published_latents:
            self._store.put(tensor_files.checkpoint_path(self.latents_folder, key, step))
            self._published_latents.add((key, step))
        # Only the object in the store is deleted. A file in the folder stays, because a rank may
        # have saved it again since the folder was listed.
        for key, step in published_latents - saved:
            self._store.remove_object(tensor_files.checkpoint_path(self.latents_folder, key, step))
            self._published_latents.discard((key, step))

    def _fetch_latents(self, job: Job, key: str) -> None:
        if not (self._store.is_remote and job.fencing_token > 1):
            return
        names = self._store.objects(LATENTS_FOLDER)
        all_steps = range(1, job.sampling.num_inference_steps + 1)
        paths = {
            step: tensor_files.checkpoint_path(self.latents_folder, key, step) for step in all_steps
        }
        steps = [step for step, path in paths.items() if f"{LATENTS_FOLDER}/{path.name}" in names]
        if steps and steps[-1] > self._steps_done(key):
            self._store.fetch(paths[steps[-1]])
        # The checkpoints are added to the set only after the fetch. Otherwise `publish_latents`,
        # which deletes checkpoints that are in the set but not in the folder, could delete the
        # latest checkpoint from the store before it is fetched.
        self._published_latents |= {(key, step) for step in steps}

    def _steps_done(self, key: str) -> int:
        return max(tensor_files.saved_steps(self.latents_folder, key), default=0)

    def _clip_input(self, job: Job) -> ClipInput:
        if self._checkpoint is None:
            return ClipInput()
        path, paths = job.input_path(self.folder), job.further_paths(self.folder)
        media_file = None if path is None else MediaFile(path, job.input_sha256, 0, 0)
        further = {
            name: MediaFile(file, job.further_inputs[name], 0, 0) for name, file in paths.items()
        }
        last_image = further.pop(LAST_IMAGE, None)
        names = reference_names(job.sampling.num_references)
        references = tuple(further.pop(name) for name in names)
        return ClipInput(
            media_file,
            job.prompt,
            job.negative_prompt,
            videos=tuple(further.items()),
            last_image=last_image,
            references=references,
        )

    def _output(self, job: Job) -> OutputConfig:
        return OutputConfig(path=str(job.clip_path(self.folder)))

    def _metadata_and_key(self, job: Job) -> tuple[dict[str, Any], str]:
        """Return the metadata of a job's clip, and the key of its latent checkpoints.

        The key depends on the job's id, so that two jobs for the same clip have separate
        checkpoints.
        """
        metadata: dict[str, Any] = {}
        identity = json.dumps([job.seed, asdict(job.sampling)], sort_keys=True)
        if self._checkpoint is not None:
            config = resolve_clip_config(job.sampling, self._config, self._checkpoint)
            output, clip_input = self._output(job), self._clip_input(job)
            loras = self._loras.files(job.loras)
            metadata = clip_metadata(clip_input, job.seed, output, config, self._checkpoint, loras)
            identity = latents_key(metadata, weights_identity(self._checkpoint))
        return metadata, hashlib.sha256(f"{job.id} {identity}".encode()).hexdigest()
