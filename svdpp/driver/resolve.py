"""From requests to work: the model's own values, the ranks' memory, their actions and jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

from svdpp.config import DEMO_MODEL, ClipRequest, ModelConfig, PipelineConfig, SamplingConfig
from svdpp.config.limits import require
from svdpp.driver.memory_process import estimate_memory
from svdpp.errors import OutOfMemoryError, RequestError, first_line
from svdpp.launch.gpus import available_bytes, format_gib, free_bytes
from svdpp.launch.world import World
from svdpp.models.checkpoint import Checkpoint, find_checkpoint, with_weights
from svdpp.plan.actions import Action, Kind, Route, Schedule, build_schedule
from svdpp.plan.costs import MemoryEstimate, PartMemory
from svdpp.plan.layout import ParallelConfig, Roles, check_chunks
from svdpp.worker.messages import ActionBatch, ClipJob

#: The components whose weights must be present: none, those of the ranks on this host, or all.
Weights = Literal["none", "host", "all"]


def resolve(
    config: PipelineConfig, *, weights: Weights = "host", world: World | None = None
) -> tuple[PipelineConfig, Checkpoint | None]:
    """Return `config` with the model's own values in place of None, and the model's checkpoint.

    Args:
        config: of the user.
        weights: the components that are downloaded if they are missing, but not before the request
            is checked against the model's configs.
        world: the launcher's; None: all ranks are here.

    Returns:
        The checkpoint is None for the dummy model.

    Raises:
        RequestError: the model cannot make such clips.
        ModelError: the model is missing, incomplete or not supported.
    """
    if config.model.is_dummy:
        return _resolved(config, None), None
    checkpoint = find_checkpoint(config.model, weights=False)
    with_defaults = _resolved(config, checkpoint)
    if weights == "none":
        return with_defaults, checkpoint
    components = sorted(checkpoint.weighted_components)
    if weights == "host":
        components = components_on_host(with_defaults, checkpoint, world)
    checkpoint = with_weights(checkpoint, config.model, components)
    return _resolved(config, checkpoint), checkpoint


def components_on_host(
    config: PipelineConfig, checkpoint: Checkpoint, world: World | None
) -> list[str]:
    """Return the names of the components that ranks on this host load, in alphabetical order.

    Args:
        config: with the model's own values.
        checkpoint: the model's.
        world: of the launcher; None: all ranks are here.
    """
    by_rank = (
        checkpoint.weighted_components_of(roles, config.sampling)
        for roles in _roles_on_host(config, world)
    )
    return sorted(frozenset[str]().union(*by_rank))


def _roles_on_host(config: PipelineConfig, world: World | None) -> set[Roles]:
    if world is None or world.size != config.world_size:  # the latter is refused later
        return set(config.layout.roles)
    # torchrun and, by default, srun number the ranks host by host.
    first = world.rank - world.local_rank
    return {*config.layout.roles[first : first + world.local_size], config.layout.roles[world.rank]}


def _resolved(config: PipelineConfig, checkpoint: Checkpoint | None) -> PipelineConfig:
    config = resolved_for(config.sampling, config, checkpoint)
    return replace(config, decode_ranks=_decode_ranks(config, checkpoint))


def resolved_for(
    sampling: SamplingConfig, config: PipelineConfig, checkpoint: Checkpoint | None
) -> PipelineConfig:
    """Return the configuration of a clip with its own sampling parameters.

    Args:
        sampling: of the clip.
        config: of the pipeline.
        checkpoint: of its model; None for the dummy model.

    Raises:
        RequestError: the model cannot make such clips.
    """
    if checkpoint is None:
        frames = config.model.dummy_latent.shape[2]
        return replace(config, sampling=sampling.with_model_defaults(model_frames=frames))
    sampling = checkpoint.resolve_sampling(sampling)
    if config.cfg_parallel > 1:
        _check_branches(sampling, checkpoint)
    boundary, num_steps = checkpoint.expert_boundary(sampling), sampling.num_inference_steps
    if boundary is not None and not 0 < boundary < num_steps:
        raise RequestError(
            f"the model has two experts, and one of them would do all {num_steps} steps",
            "use more --steps, or another --param flow_shift",
            details={"steps": num_steps, "expert_boundary": boundary},
        )
    return replace(config, sampling=sampling, expert_boundary=boundary)


def _decode_ranks(config: PipelineConfig, checkpoint: Checkpoint | None) -> int:
    """The ranks that decode each clip together; by default both of a pair, where that helps."""
    in_chunks = checkpoint is None or checkpoint.spec.decodes_in_chunks
    chunks, count = config.chunks or (config.sampling.frames,), config.decode_ranks
    if count is None:
        return min(config.cfg_parallel, len(chunks)) if in_chunks else 1
    if count > 1 and checkpoint is not None and not in_chunks:
        raise RequestError(
            f"--decode-ranks {count} cannot divide the decode of {checkpoint.label}: it is not in "
            "chunks of frames that are decoded on their own",
            "leave --decode-ranks out",
            details={"decode_ranks": count},
        )
    check_chunks(count, chunks)
    return count


def _check_branches(sampling: SamplingConfig, checkpoint: Checkpoint) -> None:
    leave_out = "leave --cfg-parallel out"
    require(
        sampling.uses_guidance,
        "--cfg-parallel 2 gives each rank of a pair one branch of the guidance, and with these "
        "parameters the guidance is off: each step has one branch",
        leave_out,
    )
    require(
        checkpoint.spec.branches is not None,
        f"--cfg-parallel 2 cannot divide the steps of {checkpoint.label}: they have more than two "
        "evaluations, or use the first at once",
        leave_out,
    )


# --- memory -------------------------------------------------------------------------------------

#: Of each rank without the model: Python, torch and diffusers (measured: 110 to 200 MiB).
_RANK_BYTES = 128 * 2**20
#: To prepare an image of 50 megapixels (measured: 597 MiB) and, in a server, one of 4 (111 MiB).
_IMAGE_BYTES = 768 * 2**20
#: Clips of the demo up to this size take half a gigabyte at most.
_DEMO_PIXELS = 2**18
#: As safetensors spells them.
_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
#: About 0.5 GB for the context and 0.1 GB for the handles of cuBLAS and cuDNN.
_CUDA_PROCESS_BYTES = 600_000_000
#: Buffers of about 0.1 GB for each of two neighbours.
_NCCL_BYTES = 200_000_000


def estimate_parts(config: PipelineConfig, checkpoint: Checkpoint | None) -> MemoryEstimate:
    """Return the memory of each part of the model, in bytes, by an estimate.

    Args:
        config: resolved.
        checkpoint: of its model; None for the dummy model, which takes next to none.
    """
    if checkpoint is None:  # the dummy takes megabytes
        nothing = PartMemory(0, 0)
        return MemoryEstimate(nothing, nothing, nothing)
    return estimate_memory(
        checkpoint, config.model, config.sampling, config.device, config.num_threads
    )


def memory_as_costs(model: ModelConfig, sampling: SamplingConfig, device: str) -> dict[str, Any]:
    """Return the memory of each part of the model as fields of `CostModel`, in GiB.

    Args:
        model: of the ranks.
        sampling: of the clips.
        device: `cpu`, `cuda` or `cuda:N`.

    Raises:
        RequestError: the model cannot make such clips.
        ModelError: the model is missing or not supported.
    """
    asked = PipelineConfig(world_size=1, model=model, sampling=sampling, device=device)
    return estimate_parts(*resolve(asked, weights="none")).as_costs()


def estimate_ranks(config: PipelineConfig) -> list[int]:
    """Return the estimated peak of each rank in bytes, on its GPU or, on the CPU, on the host.

    Args:
        config: of the user.

    Raises:
        RequestError: the model cannot make such clips.
        ModelError: the model is missing or not supported.
    """
    config, checkpoint = resolve(config, weights="none")
    parts = estimate_parts(config, checkpoint)
    return [
        parts.of_rank(roles).peak_bytes + _process_bytes(config.device)
        for roles in config.layout.roles
    ]


def memory_of_devices(
    model: ModelConfig,
    sampling: SamplingConfig,
    device: str,
    world_size: int,
    free_bytes: Callable[[str], int] = free_bytes,
) -> tuple[dict[str, float], tuple[float, ...]]:
    """Return what the choice of a layout needs to know of memory.

    Args:
        model: of the ranks.
        sampling: of the clips.
        device: `cpu`, `cuda` (each rank has its own GPU) or `cuda:N` (all share one).
        world_size: number of ranks.
        free_bytes: function that returns the free memory of a GPU.

    Returns:
        The parts' memory as fields of `CostModel`, and that of each rank, in GiB; nothing on the
        CPU.
    """
    if device == "cpu":
        return {}, ()
    if device != "cuda":
        free = [free_bytes(device) / world_size] * world_size
    else:
        free = [free_bytes(f"cuda:{rank}") for rank in range(world_size)]
    limits = tuple((each - _process_bytes(device)) / 2**30 for each in free)
    return memory_as_costs(model, sampling, device), limits


def _process_bytes(device: str) -> int:
    """A rank's memory outside the model and torch's allocator."""
    if device == "cpu":
        return _RANK_BYTES
    # Ranks that share a GPU use gloo.
    return _CUDA_PROCESS_BYTES + (_NCCL_BYTES if device == "cuda" else 0)


def check_memory(
    config: PipelineConfig, checkpoint: Checkpoint | None, ranks: Sequence[Roles]
) -> None:
    """Check that CPU ranks find the memory that they need.

    Args:
        config: resolved.
        checkpoint: of its model; None for the dummy model.
        ranks: the parts that each rank on this host has.

    Raises:
        OutOfMemoryError: they need more than this machine has free.
    """
    sampling = config.sampling
    if config.device != "cpu" or checkpoint is None:
        return
    pixels = sampling.frames * sampling.height * sampling.width
    if checkpoint.name == DEMO_MODEL and pixels <= _DEMO_PIXELS:
        return
    free = available_bytes()
    needed = _needed_together(config, checkpoint, ranks)
    if needed > free:
        noun = "rank needs" if len(ranks) == 1 else "ranks need"
        raise OutOfMemoryError(
            f"out of memory before the run: {len(ranks)} CPU {noun} about "
            f"{format_gib(needed)}, {format_gib(free)} free",
            "a smaller --world, --height and --width, --frames or --decode-chunk-size, or --dtype "
            "bf16, lowers it",
            details={
                **{"requested_bytes": needed, "free_bytes": free, "device": "cpu"},
                "num_ranks": len(ranks),
            },
        )


def _needed_together(config: PipelineConfig, checkpoint: Checkpoint, ranks: Sequence[Roles]) -> int:
    """The bytes that all ranks need; weights that they share count once."""
    parts = estimate_parts(config, checkpoint)
    num_bytes = 0
    weights: dict[tuple[Roles, int], int] = {}
    for rank, roles in enumerate(ranks):
        shares = {share: parts.of_rank(share) for share in roles.by_part()}
        for share, memory in shares.items():
            owner = 0 if _are_shared(config, checkpoint, share) else rank
            weights[share, owner] = memory.weight_bytes
        num_bytes += max((memory.activation_bytes for memory in shares.values()), default=0)
        num_bytes += _RANK_BYTES + _IMAGE_BYTES * roles.encode
    return num_bytes + sum(weights.values())


def _are_shared(config: PipelineConfig, checkpoint: Checkpoint, roles: Roles) -> bool:
    """Whether ranks map the same pages of the weights' files, which must have the loaded dtype."""

    def is_mapped(part: str) -> bool:
        dtype = "fp32" if part in checkpoint.spec.fp32_components else config.model.dtype
        return {*chain(*checkpoint.weight_files(part).values())} == {_DTYPES[dtype]}

    return all(map(is_mapped, checkpoint.weighted_components_of(roles, config.sampling)))


# --- work ---------------------------------------------------------------------------------------

_CONFIGS_KEPT = 64
_LATENTS_KEY = re.compile("[0-9a-f]{64}")


class ClipWork:
    """The conversion of requests into the work of one pipeline's ranks.

    The ranks hold their parts of the model and their links from the start, so a clip can take only
    routes that these allow.

    Args:
        config: resolved.
        checkpoint: of its model; None for the dummy model.
        keeps_latents: whether there are latent checkpoints to go on from.
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
        """Return `request` with numbers for its frame count and the pipeline's decode chunk."""
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
        """Return the configuration of a resolved request's clip."""
        return self._config if request.sampling is None else self._with(request.sampling)

    def route(self, clip: int, request: ClipRequest) -> Route:
        """Return the route of a resolved request's clip; it starts after the steps that are done.

        Args:
            clip: its index.
            request: resolved.

        Raises:
            RequestError: some ranks have not loaded what the clip needs.
        """
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
                        details={"clip": clip},
                    )
                raise RequestError(
                    f"the ranks were started with --steps {own}, and some have not loaded what "
                    f"clips of {layout.num_steps} steps need",
                    f"use {own} steps, or start the ranks with --steps {layout.num_steps}",
                    details={"clip": clip, "steps": layout.num_steps, "pipeline_steps": own},
                )
        return route.resumed(request.done_steps) if request.done_steps else route

    def _new_config(self, sampling: SamplingConfig) -> PipelineConfig:
        config = resolved_for(sampling, self._config, self._checkpoint)
        if config.sampling.from_image and not self._config.sampling.from_image:
            raise RequestError(
                "the ranks were started for clips from text alone",
                "set from_image in the pipeline's sampling parameters: such ranks make both",
            )
        return config

    def _can_take(self, layout: ParallelConfig, route: Route) -> bool:
        roles = self._config.layout.roles
        return route.links <= self._links and all(
            layout.experts_of(part) <= roles[part.rank].experts for part in route.ranges
        )

    def checked(self, requests: Iterable[ClipRequest]) -> list[ClipRequest]:
        """Return `requests` as a list, resolved: the ranks can make every clip.

        Raises:
            RequestError: they cannot make one of them.
            TypeError: one is no `ClipRequest`.
        """
        listed = list(requests)
        for index, request in enumerate(listed):
            if not isinstance(request, ClipRequest):
                raise TypeError(f"clip {index} is a {type(request).__name__}, not a ClipRequest")
            listed[index] = self.resolved(request)
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
            requests: of the clips.
            first: index of the first clip.
        """
        routes = [self.route(clip, request) for clip, request in enumerate(requests, first)]
        return build_schedule(routes, self._config.world_size)

    def messages(
        self, requests: Sequence[ClipRequest], metadata: Sequence[Mapping[str, Any]], first: int
    ) -> dict[int, bytes]:
        """Return the message for each rank that has actions, by rank.

        Args:
            requests: checked.
            metadata: of each request.
            first: index of the first clip.

        Raises:
            RequestError: a request or its metadata cannot be sent as JSON.
        """
        jobs = {
            clip: ClipJob(clip=clip, request=request, metadata=dict(own))
            for clip, (request, own) in enumerate(zip(requests, metadata, strict=True), first)
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

    def _work(self, actions: Sequence[Action], jobs: Mapping[int, ClipJob]) -> ActionBatch:
        finished = {action.clip for action in actions if action.kind is Kind.FINISH}
        own = [
            # The metadata of many clips would slow the start of ranks that do not write them.
            jobs[clip] if clip in finished else jobs[clip].model_copy(update={"metadata": {}})
            for clip in sorted({action.clip for action in actions})
        ]
        return ActionBatch(actions=tuple(actions), jobs=tuple(own))
