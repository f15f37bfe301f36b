"""`RequestScheduler`: checks requests, and creates the messages that send clips to the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from svdpp.config import ClipRequest, Lora, PipelineConfig, SamplingConfig
from svdpp.config.limits import require
from svdpp.errors import RequestError, first_line
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.lora_files import LoraFile, check_loras, find_lora
from svdpp.worker.messages import ClipBatch, ClipJob
from svdpp.worker.routes import Router

_LATENTS_KEY = re.compile("[0-9a-f]{64}")
# Number of clips per rank that `check_routes` tries. Every route (which rank runs which steps) that
# a split can give to a clip occurs among these clips.
_ROUTES = 4


class RequestScheduler:
    """Converter of requests into messages for the ranks of a pipeline.

    Args:
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of the pipeline's model; None for the dummy model.
        keeps_latents: Whether clips can resume from latent checkpoints.
    """

    def __init__(
        self, config: PipelineConfig, checkpoint: Checkpoint | None, *, keeps_latents: bool = False
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._keeps_latents = keeps_latents
        known = {} if checkpoint is None else checkpoint.clip_loras
        # LoRA files by `Lora`. All keys have the weight 1, because a file does not depend on the
        # weight. Each file has two keys: a `Lora` with the name in the request, and a `Lora` with
        # the path of the file.
        self._found_loras = {**known, **{file.lora: file for file in known.values()}}
        self._resolved: dict[SamplingConfig, SamplingConfig | None] = {}
        self.router = Router(config, checkpoint)
        """Router that computes which rank runs which steps of a clip. Each rank has an equal
        router, so requests are sent to the ranks without routes."""

    def resolve_request(self, request: ClipRequest) -> ClipRequest:
        """Return a clip's request with resolved sampling parameters and the paths of its LoRAs.

        `sampling` of the result is None if the parameters are those of the pipeline.

        Raises:
            RequestError: The model cannot make the clip, or loads no LoRAs.
            ModelError: A LoRA is missing, damaged, or does not fit the model.
        """
        if request.loras:
            loras = tuple(file.lora for file in self.find_loras(request.loras))
            request = replace(request, loras=loras)
        requested = request.sampling
        if requested is None:
            return request
        sampling = self.router.config_with(requested).sampling
        chunk = self._config.sampling.decode_chunk_size
        if chunk is not None and requested.decode_chunk_size is None:
            sampling = replace(sampling, decode_chunk_size=min(chunk, sampling.frames))
        if sampling == self._config.sampling:
            return replace(request, sampling=None)
        self.router.config_with(sampling)
        return replace(request, sampling=sampling)

    def resolve_sampling(self, sampling: SamplingConfig) -> SamplingConfig | None:
        """Return a clip's sampling parameters, resolved; None: they are those of the pipeline.

        Equal parameters are resolved only once, because a run may have 100,000 clips.

        Args:
            sampling: Sampling parameters of a clip, as requested.

        Raises:
            RequestError: The model cannot make clips with these parameters.
        """
        if sampling not in self._resolved:
            request = self.resolve_request(ClipRequest(seed=0, sampling=sampling))
            self._resolved[sampling] = request.sampling
        return self._resolved[sampling]

    def find_loras(self, loras: Iterable[Lora]) -> tuple[LoraFile, ...]:
        """Return the files of a clip's LoRAs. Each file is searched for and checked only once.

        Args:
            loras: LoRAs of the clip, each with the name in the request or the path that was found.

        Raises:
            RequestError: The model loads no LoRAs.
            ModelError: A LoRA is missing, damaged, or does not fit the model.
        """
        return tuple(self._find_lora(lora).with_weight(lora.weight) for lora in loras)

    def _find_lora(self, lora: Lora) -> LoraFile:
        checkpoint, model = self._checkpoint, self._config.model
        if checkpoint is None:
            raise RequestError("the dummy model takes no `loras`")
        if lora.source not in self._found_loras:
            # This imports diffusers, which takes seconds.
            from svdpp.models.engine.loras import check_loras_fit

            check_loras([lora], checkpoint)
            file = find_lora(
                lora.source, local_files_only=model.local_files_only, checkpoint=checkpoint
            )
            check_loras_fit([file], checkpoint)
            self._found_loras |= {lora.source: file, file.lora: file}
        return self._found_loras[lora.source]

    def check_routes(self, sampling: SamplingConfig) -> None:
        """Check that the ranks can make a clip of these parameters, whatever its index in the run.

        With some splits, a clip's index determines which rank computes which of its steps.

        Args:
            sampling: Sampling parameters of the clip, resolved or not.

        Raises:
            RequestError: The model cannot make the clip, or the ranks cannot divide the steps. The
                hint names the parameter to change.
        """
        request = self.resolve_request(ClipRequest(seed=0, sampling=sampling))
        try:
            # Several clips are checked, because with the split `alternating` clips have different
            # routes.
            for clip in range(_ROUTES * self._config.world_size):
                self.router.route(clip, request)
        except RequestError as error:
            default_steps = self._config.sampling.num_inference_steps
            field, hint = "num_inference_steps", f"use {default_steps} steps"
            if sampling.num_inference_steps == default_steps:
                field, hint = "flow_shift", "leave `flow_shift` out"
            details = {**error.details, "field": field}
            raise RequestError(error.message, hint, details=details) from error

    def resolve_requests(self, requests: Iterable[ClipRequest]) -> list[ClipRequest]:
        """Check clips' requests, and return them with resolved sampling parameters and LoRAs.

        Raises:
            RequestError: The ranks cannot make one of the clips.
            TypeError: An element is not a `ClipRequest`.
        """
        listed = list(requests)
        for index, request in enumerate(listed):
            if not isinstance(request, ClipRequest):
                raise TypeError(f"clip {index} is a {type(request).__name__}, not a ClipRequest")
            listed[index] = self.resolve_request(request)
            try:
                self._check(listed[index])
            except RequestError as error:
                raise RequestError(
                    f"clip {index}: {error.message}",
                    error.hint,
                    details={**error.details, "clip": index},
                ) from error
        return listed

    def _check(self, request: ClipRequest) -> None:
        sampling, done = self.router.config_of(request).sampling, request.done_steps
        if self._checkpoint is not None and not done:
            self._checkpoint.check_request(sampling, request)
        if request.latents_key is not None and not _LATENTS_KEY.fullmatch(request.latents_key):
            raise RequestError(
                f"latents_key must be 64 hex digits, got {request.latents_key!r}",
                details={"latents_key": request.latents_key, "num_digits": 64},
            )
        require(
            self._keeps_latents or not done,
            f"done_steps is {done}, but there are no latent checkpoints",
            "give the Pipeline the folder of the earlier run, as latents_folder=...",
            done_steps=done,
        )
        most = sampling.num_inference_steps
        require(done <= most, f"done_steps must be at most {most}", done_steps=done, steps=most)

    def messages(
        self, requests: Sequence[ClipRequest], metadata: Sequence[Mapping[str, Any]], first: int
    ) -> dict[int, bytes]:
        """Return the message with new clips for each rank, by rank; empty if there are no requests.

        Each message contains all clips, and each rank computes its own actions from it.

        Args:
            requests: Resolved and checked requests.
            metadata: Fields to add to each clip's JSON, one mapping for each request.
            first: Index of the first clip.

        Raises:
            RequestError: A request or its metadata cannot be sent as JSON.
        """
        if not requests:
            return {}
        finishers = [
            self.router.route(clip, request).ranges[-1].rank
            for clip, request in enumerate(requests, first)
        ]
        jobs = [
            ClipJob(clip=clip, request=request, metadata=dict(recorded))
            for clip, (request, recorded) in enumerate(zip(requests, metadata, strict=True), first)
        ]
        # Only the rank that writes a clip gets the metadata, because large messages slow the start.
        bare = [job.model_copy(update={"metadata": {}}) for job in jobs]
        try:
            return {
                rank: ClipBatch(
                    jobs=tuple(
                        whole if rank == finisher else without
                        for whole, without, finisher in zip(jobs, bare, finishers, strict=True)
                    )
                ).to_bytes()
                for rank in range(self._config.world_size)
            }
        except (TypeError, ValueError) as error:
            problem = first_line(error)
            text = f"the clips cannot be sent to the ranks: {problem}"
            raise RequestError(text, details={"problem": problem}) from error
