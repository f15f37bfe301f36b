"""Owns the configuration of each clip: the pipeline's, with the clip's own sampling parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.driver.resolve import resolved_for
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Route

_CONFIGS_KEPT = 64


class ClipConfigs:
    """Configurations and routes of the clips of one pipeline.

    The ranks hold their parts of the model and their links from the start, so a clip can take only
    routes that these allow.

    Args:
        config: of the pipeline, resolved.
        checkpoint: of the model; None for the dummy model.
    """

    def __init__(self, config: PipelineConfig, checkpoint: Checkpoint | None) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._links = frozenset(config.links)
        self._with = lru_cache(_CONFIGS_KEPT)(self._new_config)

    def _new_config(self, sampling: SamplingConfig) -> PipelineConfig:
        config = resolved_for(sampling, self._config, self._checkpoint)
        if _starts_from_image(config.sampling) and not _starts_from_image(self._config.sampling):
            raise RequestError(
                "the ranks were started for clips from text alone",
                "set from_image in the pipeline's sampling parameters: such ranks make both",
            )
        return config

    def resolved(self, request: ClipRequest) -> ClipRequest:
        """`request` with numbers for its frame count and decode chunk; the latter the pipeline's.

        Raises:
            RequestError: the pipeline cannot make clips with these sampling parameters.
        """
        asked = request.sampling
        if asked is None:
            return request
        sampling = self._with(asked).sampling
        chunk = self._config.sampling.decode_chunk_size
        if chunk is not None and asked.decode_chunk_size is None:
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
        if request.sampling is not None and not self._can_take(layout, route):
            route = layout.route(clip, all_stages=True)
            if not self._can_take(layout, route):
                own = self._config.sampling.num_inference_steps
                if layout.num_steps == own:
                    raise RequestError(
                        "with these parameters the model changes its expert at another step, and "
                        "some ranks have not loaded the expert that they would need",
                        "use the pipeline's --flow-shift",
                    )
                raise RequestError(
                    f"the ranks were started for clips of {own} steps, and some have not loaded "
                    f"what clips of {layout.num_steps} steps need",
                    f"use {own} steps, or start svdpp for such clips (--steps {layout.num_steps})",
                )
        return route.resumed(request.done_steps) if request.done_steps else route

    def _can_take(self, layout: Layout, route: Route) -> bool:
        pairs = {(part.rank, after.rank) for part, after in pairwise(route.ranges)}
        roles = self._config.roles
        return pairs <= self._links and all(
            layout.experts_of(part) <= roles[part.rank].experts for part in route.ranges
        )


def _starts_from_image(sampling: SamplingConfig) -> bool:
    """Whether a clip needs the encoder of images; ranks of families without prompts have it."""
    return not isinstance(sampling, PromptedSampling) or sampling.from_image
