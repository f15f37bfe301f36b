"""Routes of clips through the ranks, and the actions of each rank, computed from requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.limits import require
from svdpp.errors import RequestError, pluralize
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Route, Schedule, build_schedule
from svdpp.plan.layout import Layout

_CONFIGS_KEPT = 64


class Router:
    """Router that computes each clip's route (which rank runs which steps) and each rank's actions.

    The parent and each rank have a router. All routers compute the same actions from the same
    requests, so the parent sends only requests to the ranks. The ranks load parts of the model and
    open links only when they start, so the route of every clip may use only these parts and links.

    Args:
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of the model; None for the dummy model.
    """

    def __init__(self, config: PipelineConfig, checkpoint: Checkpoint | None) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._links = frozenset(config.layout.links)
        #: Function that returns the configuration of a clip with given sampling parameters.
        self.config_with = lru_cache(_CONFIGS_KEPT)(self._new_config)

    def config_of(self, request: ClipRequest) -> PipelineConfig:
        """Return the configuration for a clip, given its request with all defaults filled in."""
        return self._config if request.sampling is None else self.config_with(request.sampling)

    def route(self, clip: int, request: ClipRequest) -> Route:
        """Return which ranks run which steps of a clip, from its first unfinished step on.

        Only a clip that resumes from a latent checkpoint already has finished steps.

        Args:
            clip: Index of the clip.
            request: Request for the clip, with all defaults filled in.

        Raises:
            RequestError: A rank on the route has not loaded a part of the model that the clip
                needs.
        """
        layout = self.config_of(request).layout
        route = layout.route(clip)
        if request.sampling is not None and not self._can_take(layout, route):
            route = layout.route(clip, all_stages=True)
            if not self._can_take(layout, route):
                planned = self._config.sampling.num_inference_steps
                if layout.num_steps == planned:
                    raise RequestError(
                        "with these parameters the model switches to its second expert at another "
                        "step than planned, and some ranks have not loaded the expert that their "
                        "steps now need",
                        "use the same `flow_shift` as the pipeline",
                        details={"clip": clip},
                    )
                raise RequestError(
                    f"the ranks were started with `num_inference_steps` {planned}, and some ranks "
                    "have not loaded the components that clips of "
                    f"{pluralize(layout.num_steps, 'step')} need",
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
                "the clip starts from an image, but the ranks were started for clips from text "
                "only",
                "set from_image in the sampling parameters of the pipeline to make clips from text "
                "and from images",
            )
        return config

    def _can_take(self, layout: Layout, route: Route) -> bool:
        roles = self._config.layout.roles
        return route.links <= self._links and all(
            layout.experts_of(part) <= roles[part.rank].experts for part in route.ranges
        )

    def schedule(self, requests: Sequence[ClipRequest], first: int) -> Schedule:
        """Return the action list of each rank for further clips, given their requests.

        Args:
            requests: Requests for the clips, with all defaults filled in.
            first: Index of the first clip.
        """
        routes = [self.route(clip, request) for clip, request in enumerate(requests, first)]
        return build_schedule(routes, self._config.world_size)


def resolve_clip_config(
    sampling: SamplingConfig, config: PipelineConfig, checkpoint: Checkpoint | None
) -> PipelineConfig:
    """Check a clip's sampling parameters; return the pipeline's configuration with them.

    Args:
        sampling: Sampling parameters of the clip.
        config: Configuration of the pipeline.
        checkpoint: Checkpoint of the model; None for the dummy model.

    Raises:
        RequestError: The model cannot make a clip with these parameters, or the ranks
            cannot divide the work.
    """
    if checkpoint is None:
        frames = config.model.dummy_latent.shape[2]
        return replace(config, sampling=sampling.with_model_defaults(model_frames=frames))
    sampling = checkpoint.resolve_sampling(sampling)
    if config.parallel.cfg_parallel_size > 1:
        _check_branches(sampling, checkpoint)
    boundary, num_steps = checkpoint.expert_boundary(sampling), sampling.num_inference_steps
    if boundary is not None and not 0 < boundary < num_steps:
        steps = "the only step" if num_steps == 1 else f"all {num_steps} steps"
        raise RequestError(
            f"the model has two experts, and one of them would run {steps}",
            "use more `num_inference_steps`, or use another `flow_shift`",
            details={"steps": num_steps, "expert_boundary": boundary},
        )
    tiles: tuple[int, ...] = ()
    if config.model.vae_tiling and checkpoint.spec.decodes_in_tiles:
        # This imports diffusers, which takes seconds.
        from svdpp.models.engine.tiles import tile_sizes

        tiles = tile_sizes(checkpoint, sampling)
    return replace(config, sampling=sampling, expert_boundary=boundary, tiles=tiles)


def _check_branches(sampling: SamplingConfig, checkpoint: Checkpoint) -> None:
    leave_out = "leave `cfg_parallel` out"
    require(
        sampling.uses_guidance,
        "`cfg_parallel` 2 gives each rank of a pair one branch of the guidance, but with these "
        "parameters the guidance is off",
        leave_out,
        cfg_parallel=2,
    )
    require(
        checkpoint.spec.branches is not None,
        f"`cfg_parallel` 2 cannot divide the steps of {checkpoint.label}: the denoiser's calls for "
        "the two branches of the guidance are not independent",
        leave_out,
        cfg_parallel=2,
    )
