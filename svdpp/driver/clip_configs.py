"""Owns the configuration of each clip: the pipeline's, with the clip's own sampling parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.errors import RequestError
from svdpp.plan.schedule import Route

_CONFIGS_KEPT = 64


class ClipConfigs:
    """Configurations and routes of the clips of one pipeline.

    The ranks hold their parts of the model and their links from the start, so a clip can take only
    routes that these allow.

    Args:
        config: of the pipeline, resolved.
        model_frames: the frame count of clips whose sampling parameters give none.
    """

    def __init__(self, config: PipelineConfig, model_frames: int) -> None:
        self._config = config
        self._model_frames = model_frames
        self._links = frozenset(config.links)
        self._with = lru_cache(_CONFIGS_KEPT)(config.with_sampling)

    def resolved(self, request: ClipRequest) -> ClipRequest:
        """`request` with numbers for its frame count and decode chunk; the latter the pipeline's.

        Raises:
            RequestError: the pipeline cannot make clips with these sampling parameters.
        """
        asked = request.sampling
        if asked is None:
            return request
        sampling = asked.resolved(model_frames=self._model_frames)
        chunk = self._config.sampling.decode_chunk_size
        if asked.decode_chunk_size is None and chunk is not None:
            sampling = replace(sampling, decode_chunk_size=min(chunk, sampling.frames))
        if sampling == self._config.sampling:
            return replace(request, sampling=None)
        num_steps, own = sampling.num_inference_steps, self._config.sampling.num_inference_steps
        if self._config.is_draft(request) and num_steps != own:
            raise RequestError(f"a draft of this pipeline has {own} steps, got {num_steps}")
        self._with(sampling)
        return replace(request, sampling=sampling)

    def of(self, request: ClipRequest) -> PipelineConfig:
        """The configuration of a resolved request's clip."""
        return self._config if request.sampling is None else self._with(request.sampling)

    def num_steps(self, request: ClipRequest) -> int:
        """The number of steps of a resolved request's clip."""
        return self.of(request).sampling.num_inference_steps

    def route(self, clip: int, request: ClipRequest) -> Route:
        """The route of a resolved request's clip; it starts after the steps that are done.

        Raises:
            RequestError: the ranks do not have the links or the weights for it.
        """
        layout = self.of(request).layout
        route = layout.route(clip)
        if request.sampling is not None and not self._can_take(route):
            route = layout.route(clip, all_stages=True)
            if not self._can_take(route):
                own = self._config.sampling.num_inference_steps
                raise RequestError(
                    f"the ranks were started for clips of {own} steps, and some have not loaded "
                    f"what clips of {layout.num_steps} steps need",
                    f"use {own} steps, or start svdpp for such clips (--steps {layout.num_steps})",
                )
        return route.resumed(request.done_steps) if request.done_steps else route

    def _can_take(self, route: Route) -> bool:
        pairs = {(part.rank, after.rank) for part, after in pairwise(route.ranges)}
        roles = self._config.roles
        return pairs <= self._links and all(
            roles[part.rank].denoise for part in route.ranges if part.num_steps
        )
