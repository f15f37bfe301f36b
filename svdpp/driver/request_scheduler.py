"""Scheduling of requests: the actions and jobs of each rank for the clips of one pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.limits import require
from svdpp.driver.resolve import resolve_clip_config
from svdpp.errors import RequestError, first_line
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Action, Kind, Route, Schedule, build_schedule
from svdpp.plan.layout import Layout
from svdpp.worker.messages import ActionBatch, ClipJob

_CONFIGS_KEPT = 64
_LATENTS_KEY = re.compile("[0-9a-f]{64}")


class RequestScheduler:
    """Converter of requests into the work of one pipeline's ranks.

    The ranks load their parts of the model and open their links at the start, so a clip can take
    only the routes that these allow.

    Args:
        config: resolved configuration.
        checkpoint: checkpoint of its model; None for the dummy model.
        keeps_latents: whether clips can resume from latent checkpoints.
    """

    def __init__(
        self, config: PipelineConfig, checkpoint: Checkpoint | None, *, keeps_latents: bool = False
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._keeps_latents = keeps_latents
        self._links = frozenset(config.layout.links)
        self._config_with = lru_cache(_CONFIGS_KEPT)(self._new_config)

    def resolve_request(self, request: ClipRequest) -> ClipRequest:
        """Return `request` with numbers for its frame count and the pipeline's decode chunk."""
        requested = request.sampling
        if requested is None:
            return request
        sampling = self._config_with(requested).sampling
        chunk = self._config.sampling.decode_chunk_size
        if chunk is not None and requested.decode_chunk_size is None:
            sampling = replace(sampling, decode_chunk_size=min(chunk, sampling.frames))
        if sampling == self._config.sampling:
            return replace(request, sampling=None)
        self._config_with(sampling)
        return replace(request, sampling=sampling)

    def config_of(self, request: ClipRequest) -> PipelineConfig:
        """Return the configuration of a resolved request's clip."""
        return self._config if request.sampling is None else self._config_with(request.sampling)

    def route(self, clip: int, request: ClipRequest) -> Route:
        """Return the route of a resolved request's clip; it starts after the steps that are done.

        Args:
            clip: index of the clip.
            request: resolved request.

        Raises:
            RequestError: some ranks have not loaded what the clip needs.
        """
        layout = self.config_of(request).layout
        route = layout.route(clip)
        if request.sampling is not None and not self._can_take(layout, route):
            route = layout.route(clip, all_stages=True)
            if not self._can_take(layout, route):
                planned = self._config.sampling.num_inference_steps
                if layout.num_steps == planned:
                    raise RequestError(
                        "with these parameters the model changes its expert at another step, and "
                        "some ranks have not loaded the expert that they would need",
                        "use the pipeline's `flow_shift`",
                        details={"clip": clip},
                    )
                raise RequestError(
                    f"the ranks were started with `num_inference_steps` {planned}, and some have "
                    f"not loaded what clips of {layout.num_steps} steps need",
                    f"use {planned} steps, or start the ranks with `num_inference_steps` "
                    f"{layout.num_steps}",
                    details={
                        "clip": clip,
                        "steps": layout.num_steps,
                        "pipeline_steps": planned,
                    },
                )
        return route.resumed(request.done_steps) if request.done_steps else route

    def _new_config(self, sampling: SamplingConfig) -> PipelineConfig:
        config = resolve_clip_config(sampling, self._config, self._checkpoint)
        if config.sampling.from_image and not self._config.sampling.from_image:
            raise RequestError(
                "the ranks were started for clips from text alone",
                "set from_image in the pipeline's sampling parameters: such ranks make both",
            )
        return config

    def _can_take(self, layout: Layout, route: Route) -> bool:
        roles = self._config.layout.roles
        return route.links <= self._links and all(
            layout.experts_of(part) <= roles[part.rank].experts for part in route.ranges
        )

    def resolve_requests(self, requests: Iterable[ClipRequest]) -> list[ClipRequest]:
        """Return `requests` as a list, resolved: the ranks can make every clip.

        Raises:
            RequestError: they cannot make one of them.
            TypeError: one is no `ClipRequest`.
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
        sampling, done = self.config_of(request).sampling, request.done_steps
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

    def schedule(self, requests: Sequence[ClipRequest], first: int) -> Schedule:
        """Return each rank's actions for resolved requests.

        Args:
            requests: resolved requests of the clips.
            first: index of the first clip.
        """
        routes = [self.route(clip, request) for clip, request in enumerate(requests, first)]
        return build_schedule(routes, self._config.world_size)

    def messages(
        self, requests: Sequence[ClipRequest], metadata: Sequence[Mapping[str, Any]], first: int
    ) -> dict[int, bytes]:
        """Return the message for each rank that has actions, by rank.

        Args:
            requests: checked requests of the clips.
            metadata: metadata of each clip.
            first: index of the first clip.

        Raises:
            RequestError: a request or its metadata cannot be sent as JSON.
        """
        jobs = {
            clip: ClipJob(clip=clip, request=request, metadata=dict(recorded))
            for clip, (request, recorded) in enumerate(zip(requests, metadata, strict=True), first)
        }
        schedule = self.schedule(requests, first)
        try:
            return {
                rank: self._batch(actions, jobs).to_bytes()
                for rank, actions in enumerate(schedule)
                if actions
            }
        except (TypeError, ValueError) as error:
            problem = first_line(error)
            text = f"the clips cannot be sent to the ranks: {problem}"
            raise RequestError(text, details={"problem": problem}) from error

    def _batch(self, actions: Sequence[Action], jobs: Mapping[int, ClipJob]) -> ActionBatch:
        finished = {action.clip for action in actions if action.kind is Kind.FINISH}
        rank_jobs = [
            # The metadata of many clips would slow the start of ranks that do not write them.
            jobs[clip] if clip in finished else jobs[clip].model_copy(update={"metadata": {}})
            for clip in sorted({action.clip for action in actions})
        ]
        return ActionBatch(actions=tuple(actions), jobs=tuple(rank_jobs))
