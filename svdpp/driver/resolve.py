"""From requests to work: the model's defaults, each clip's route, each rank's actions and jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.errors import RequestError, first_line
from svdpp.launch.world import World
from svdpp.models.checkpoint import Checkpoint, find_checkpoint, with_weights
from svdpp.plan.actions import Action, Kind, Route, Schedule, build_schedule
from svdpp.plan.layout import Layout, Roles, check_chunks
from svdpp.worker.messages import ClipJob, Work

#: The components whose weights must be present: none, those of the ranks on this host, or all.
Weights = Literal["none", "host", "all"]


def resolve(
    config: PipelineConfig, *, weights: Weights = "host", world: World | None = None
) -> tuple[PipelineConfig, Checkpoint | None]:
    """`config` with the model's own values in place of None, and the model's checkpoint.

    The request is checked against the model's configs before a weight is downloaded.

    `weights` says which components must be present: missing files of a hub model are
    downloaded. `world` is the launcher's; None: all ranks are on this host.
    """
    if config.model.is_dummy:
        return resolved(config, None), None
    checkpoint = find_checkpoint(config.model, weights=False)
    with_defaults = resolved(config, checkpoint)
    if weights == "none":
        return with_defaults, checkpoint
    components = frozenset(checkpoint.weighted)
    if weights == "host":
        on_host = _roles_on_host(with_defaults, world)
        by_rank = (checkpoint.components_of(roles, with_defaults.sampling) for roles in on_host)
        components = frozenset().union(*by_rank)
    checkpoint = with_weights(checkpoint, config.model, sorted(components))
    return resolved(config, checkpoint), checkpoint


def _roles_on_host(config: PipelineConfig, world: World | None) -> set[Roles]:
    if world is None or world.size != config.world_size:  # the latter is refused later
        return set(config.layout.roles)
    # torchrun and, by default, srun number the ranks host by host.
    first = world.rank - world.local_rank
    return {*config.layout.roles[first : first + world.local_size], config.layout.roles[world.rank]}


def resolved(config: PipelineConfig, checkpoint: Checkpoint | None) -> PipelineConfig:
    """`config` with the model's own values in place of None."""
    sampling, boundary = _resolved(config, config.sampling, checkpoint)
    found = replace(config, sampling=sampling, expert_boundary=boundary)
    return replace(found, decode_ranks=_decode_ranks(found, checkpoint))


def resolved_for(
    sampling: SamplingConfig, config: PipelineConfig, checkpoint: Checkpoint | None
) -> PipelineConfig:
    """The configuration of a clip with its own sampling parameters, in a pipeline of `config`."""
    return config.with_sampling(*_resolved(config, sampling, checkpoint))


def _decode_ranks(config: PipelineConfig, checkpoint: Checkpoint | None) -> int:
    """The ranks that decode each clip together; by default both of a pair, where that helps."""
    in_chunks = checkpoint is None or checkpoint.row.decodes_in_chunks
    chunks, count = config.chunks or (config.sampling.frames,), config.decode_ranks
    if count is None:
        return min(config.cfg_parallel, len(chunks)) if in_chunks else 1
    if count > 1 and checkpoint is not None and not in_chunks:
        raise RequestError(
            f"--decode-ranks {count} cannot divide the decode of {checkpoint.label}: it is not in "
            "chunks of frames that are decoded on their own",
            "leave --decode-ranks out",
        )
    check_chunks(count, chunks)
    return count


def _check_branches(sampling: SamplingConfig, checkpoint: Checkpoint) -> None:
    leave_out = "leave --cfg-parallel out"
    if not sampling.guided:
        raise RequestError(
            "--cfg-parallel 2 gives each rank of a pair one branch of the guidance, and with these "
            "parameters the guidance is off: each step has one branch",
            leave_out,
        )
    if checkpoint.row.branches is None:
        raise RequestError(
            f"--cfg-parallel 2 cannot divide the steps of {checkpoint.label}: they have more than "
            "two evaluations, or use the first at once",
            leave_out,
        )


def _resolved(
    config: PipelineConfig, sampling: SamplingConfig, checkpoint: Checkpoint | None
) -> tuple[SamplingConfig, int | None]:
    if checkpoint is None:
        frames = config.model.dummy_latent.shape[2]
        return sampling.resolved(model_frames=frames), config.expert_boundary
    sampling = checkpoint.resolve(sampling)
    if config.cfg_parallel > 1:
        _check_branches(sampling, checkpoint)
    boundary, num_steps = checkpoint.expert_boundary(sampling), sampling.num_inference_steps
    if boundary is not None and not 0 < boundary < num_steps:
        raise RequestError(
            f"the model has two experts, and one of them would do all {num_steps} steps",
            "use more --steps, or another --param flow_shift",
        )
    return sampling, boundary


_CONFIGS_KEPT = 64
_LATENTS_KEY = re.compile("[0-9a-f]{64}")


class ClipWork:
    """Turns requests into the work of the ranks of one pipeline, whose `config` is resolved.

    The ranks hold their parts of the model and their links from the start, so a clip can take only
    routes that these allow.
    """

    def __init__(
        self, config: PipelineConfig, checkpoint: Checkpoint | None, *, keeps_latents: bool = False
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._keeps_latents = keeps_latents
        self._links = frozenset(config.layout.links)
        self._with = lru_cache(_CONFIGS_KEPT)(self._new_config)

    def resolved(self, request: ClipRequest) -> ClipRequest:
        """`request` with numbers for its frame count and the pipeline's decode chunk."""
        own = request.sampling
        if own is None:
            return request
        sampling = self._with(own).sampling
        chunk = self._config.sampling.decode_chunk_size
        if chunk is not None and own.decode_chunk_size is None:
            sampling = replace(sampling, decode_chunk_size=min(chunk, sampling.frames))
        if sampling == self._config.sampling:
            return replace(request, sampling=None)
        self._with(sampling)
        return replace(request, sampling=sampling)

    def config_of(self, request: ClipRequest) -> PipelineConfig:
        """The configuration of a resolved request's clip."""
        return self._config if request.sampling is None else self._with(request.sampling)

    def num_steps(self, request: ClipRequest) -> int:
        """The number of steps of a resolved request's clip."""
        return self.config_of(request).sampling.num_inference_steps

    def route(self, clip: int, request: ClipRequest) -> Route:
        """The route of a resolved request's clip; it starts after the steps that are done."""
        layout = self.config_of(request).layout
        route = layout.route(clip)
        if request.sampling is not None and not self._can_take(layout, route):
            route = layout.route(clip, all_stages=True)
            if not self._can_take(layout, route):
                own = self._config.sampling.num_inference_steps
                if layout.num_steps == own:
                    raise RequestError(
                        "with these parameters the model changes its expert at another step, and "
                        "some ranks have not loaded the expert that they would need",
                        "use the pipeline's --param flow_shift",
                    )
                raise RequestError(
                    f"the ranks were started with --steps {own}, and some have not loaded what "
                    f"clips of {layout.num_steps} steps need",
                    f"use {own} steps, or start svdpp with --steps {layout.num_steps}",
                )
        return route.resumed(request.done_steps) if request.done_steps else route

    def _new_config(self, sampling: SamplingConfig) -> PipelineConfig:
        config = resolved_for(sampling, self._config, self._checkpoint)
        if _starts_from_image(config.sampling) and not _starts_from_image(self._config.sampling):
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

    def checked(self, requests: ClipRequest | Iterable[ClipRequest]) -> list[ClipRequest]:
        """`requests` as a list, resolved: the ranks can make every clip."""
        listed = [requests] if isinstance(requests, ClipRequest) else requests
        checked: list[ClipRequest] = []
        for index, request in enumerate(listed):
            name = f"clip {index} of the list" if listed is requests else "the clip"
            if not isinstance(request, ClipRequest):
                raise TypeError(f"{name} is a {type(request).__name__}, not a ClipRequest")
            checked.append(self.resolved(request))
            self._check(name, checked[-1])
        return checked

    def _check(self, name: str, request: ClipRequest) -> None:
        sampling = self.config_of(request).sampling
        if self._checkpoint is not None and not request.done_steps:
            try:
                self._checkpoint.check_request(sampling, request)
            except RequestError as error:
                raise RequestError(
                    f"{name}: {error.message}",
                    "give its ClipRequest image=... or prompt=..., as the model needs",
                ) from error
        if request.done_steps:
            self._check_resumed(name, request, sampling.num_inference_steps)
        if request.latents_key is not None and not _LATENTS_KEY.fullmatch(request.latents_key):
            raise RequestError(
                f"{name}: latents_key must be 64 hex digits, got {request.latents_key}"
            )

    def _check_resumed(self, name: str, request: ClipRequest, num_steps: int) -> None:
        done = request.done_steps
        if not self._keeps_latents:
            raise RequestError(
                f"{name} has done_steps={done}, but there are no latent checkpoints",
                "give the Pipeline the folder of the earlier run, as latents_folder=...",
            )
        if not 0 < done <= num_steps:
            raise RequestError(f"{name}: done_steps must be 0 to {num_steps}, got {done}")

    def schedule(self, requests: Sequence[ClipRequest], first: int) -> Schedule:
        """Each rank's actions for resolved `requests`, whose clips are numbered from `first`."""
        routes = [self.route(clip, request) for clip, request in enumerate(requests, first)]
        return build_schedule(routes, self._config.world_size)

    def messages(
        self, requests: Sequence[ClipRequest], metadata: Sequence[dict[str, Any]], first: int
    ) -> dict[int, bytes]:
        """The message for each rank that has actions, by rank.

        `requests` are checked, each with its metadata; `first` is the index of the first clip.
        """
        jobs = {
            first + index: ClipJob(clip=first + index, request=request, metadata=metadata[index])
            for index, request in enumerate(requests)
        }
        schedule = self.schedule(requests, first)
        try:
            return {
                rank: self._work(actions, jobs).to_bytes()
                for rank, actions in enumerate(schedule)
                if actions
            }
        except (TypeError, ValueError) as error:
            text = f"the clips cannot be sent to the ranks: {first_line(error)}"
            raise RequestError(text) from error

    def _work(self, actions: Sequence[Action], jobs: Mapping[int, ClipJob]) -> Work:
        finished = {action.clip for action in actions if action.kind is Kind.FINISH}
        own = [
            # The metadata of many clips would slow the start of ranks that do not write them.
            jobs[clip] if clip in finished else jobs[clip].model_copy(update={"metadata": {}})
            for clip in sorted({action.clip for action in actions})
        ]
        return Work(actions=tuple(actions), jobs=tuple(own))


def check_metadata(metadata: Iterable[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """`metadata` as a list of one dictionary for each of `count` clips; empty means empty ones."""
    dictionaries = [dict(values) for values in metadata]
    if dictionaries and len(dictionaries) != count:
        raise RequestError(
            f"got {len(dictionaries)} metadata for {count} clips: give one for each clip"
        )
    return dictionaries or [{} for _ in range(count)]


def _starts_from_image(sampling: SamplingConfig) -> bool:
    return not isinstance(sampling, PromptedSampling) or sampling.from_image
