"""From requests to work: each clip's configuration and route, then each rank's actions and jobs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.driver.resolve import resolved_for
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Action, Kind
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Route, Schedule, build_schedule, check_schedule
from svdpp.worker.messages import ClipJob, Work

_CONFIGS_KEPT = 64
_LATENTS_KEY = re.compile("[0-9a-f]{64}")


class ClipWork:
    """Turns requests into the work of one pipeline's ranks.

    The ranks hold their parts of the model and their links from the start, so a clip can take only
    routes that these allow.

    Args:
        config: of the pipeline, resolved.
        checkpoint: of the model; None for the dummy model.
        keeps_latents: whether the pipeline has a folder of latent checkpoints.
    """

    def __init__(
        self, config: PipelineConfig, checkpoint: Checkpoint | None, *, keeps_latents: bool = False
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._keeps_latents = keeps_latents
        self._links = frozenset(config.layout.links)
        self._with = lru_cache(_CONFIGS_KEPT)(self._new_config)

    # 1. One clip.

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
        self._with(sampling)
        return replace(request, sampling=sampling)

    def config_of(self, request: ClipRequest) -> PipelineConfig:
        """The configuration of a resolved request's clip."""
        return self._config if request.sampling is None else self._with(request.sampling)

    def num_steps(self, request: ClipRequest) -> int:
        """The number of steps of a resolved request's clip."""
        return self.config_of(request).sampling.num_inference_steps

    def route(self, clip: int, request: ClipRequest) -> Route:
        """The route of a resolved request's clip; it starts after the steps that are done.

        Raises:
            RequestError: the ranks do not have the links or the weights for it.
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
                    )
                raise RequestError(
                    f"the ranks were started for clips of {own} steps, and some have not loaded "
                    f"what clips of {layout.num_steps} steps need",
                    f"use {own} steps, or start svdpp for such clips (--steps {layout.num_steps})",
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

    # 2. Requests as callers give them.

    def checked(self, requests: ClipRequest | Iterable[ClipRequest]) -> list[ClipRequest]:
        """`requests` as a list, resolved: the ranks can make every clip.

        Raises:
            TypeError: an element is not a `ClipRequest`.
            RequestError: a clip lacks an input or a latent checkpoint that it needs, or has
                sampling parameters that the pipeline cannot run.
        """
        one = isinstance(requests, ClipRequest)
        found = []
        for index, request in enumerate([requests] if one else _as_list(requests, "requests")):
            name = "the clip" if one else f"clip {index} of the list"
            if not isinstance(request, ClipRequest):
                raise TypeError(f"{name} is {_kind(request)}, not a ClipRequest")
            found.append(self.resolved(request))
            self._check(name, found[-1])
        return found

    def _check(self, name: str, request: ClipRequest) -> None:
        sampling = self.config_of(request).sampling
        if self._checkpoint is not None and not request.done_steps:
            try:
                self._checkpoint.check_requests(sampling, [request])
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

    # 3. All clips, as actions.

    def schedule(self, requests: Sequence[ClipRequest], first: int) -> Schedule:
        """Each rank's actions for resolved `requests`, whose clips are numbered from `first`.

        Raises:
            RequestError: a clip has no route through the pipeline.
        """
        routes = [self.route(clip, request) for clip, request in enumerate(requests, first)]
        return build_schedule(routes, self._config.world_size)

    def messages(
        self, requests: Sequence[ClipRequest], metadata: Sequence[dict[str, Any]], first: int
    ) -> dict[int, list[bytes]]:
        """The messages for each rank that has actions, by rank.

        Args:
            requests: checked.
            metadata: one for each request.
            first: index of the first clip.

        Raises:
            RequestError: a value in a request or its metadata cannot be sent to a rank, or a clip
                has no route through the pipeline.
        """
        pairs = zip(requests, metadata, strict=True)
        jobs = [_job(first, index, request, each) for index, (request, each) in enumerate(pairs)]
        messages: defaultdict[int, list[bytes]] = defaultdict(list)
        schedule = self.schedule(requests, first)
        check_schedule(schedule, dict(enumerate(map(self.num_steps, requests), first)))
        for rank, actions in enumerate(schedule):
            if actions:
                jobs_of_clips = {action.clip: jobs[action.clip - first] for action in actions}
                messages[rank].append(self._work(actions, jobs_of_clips).to_bytes())
        return messages

    def _work(self, actions: Sequence[Action], jobs: Mapping[int, ClipJob]) -> Work:
        # Only these ranks need the requests, and the metadata of many clips would slow the start.
        needed = {action.clip for action in actions if action.kind in (Kind.ENCODE, Kind.FINISH)}
        requests = {clip: job.request for clip, job in sorted(jobs.items())}
        keys = {clip: r.latents_key for clip, r in requests.items() if self._keeps_latents}
        samplings = {clip: request.sampling for clip, request in requests.items()}
        return Work(
            actions=tuple(actions),
            jobs=tuple(jobs[clip] for clip in sorted(needed)),
            latents_keys={clip: key for clip, key in keys.items() if key is not None},
            samplings={clip: own for clip, own in samplings.items() if own is not None},
        )


def check_metadata(metadata: Iterable[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """`metadata` as a list of one dictionary for each of `count` clips; empty means empty ones.

    Raises:
        TypeError: an element is not a mapping.
        RequestError: the number of elements is not `count`.
    """
    found = _as_list(metadata, "metadata")
    for index, each in enumerate(found):
        if not isinstance(each, Mapping):
            raise TypeError(f"metadata {index} of the list is {_kind(each)}, not a dictionary")
    if found and len(found) != count:
        raise RequestError(f"got {len(found)} metadata for {count} clips: give one for each clip")
    return [dict(each) for each in found] or [{} for _ in range(count)]


def _starts_from_image(sampling: SamplingConfig) -> bool:
    """Whether a clip needs the encoder of images; ranks of families without prompts have it."""
    return not isinstance(sampling, PromptedSampling) or sampling.from_image


def _job(first: int, index: int, request: ClipRequest, metadata: dict[str, Any]) -> ClipJob:
    """A clip's job, parsed as the ranks parse it: an error there would end the run."""
    try:
        job = ClipJob(clip=first + index, request=request, metadata=metadata)
        return ClipJob.model_validate(job.model_dump(mode="json", warnings=False))
    except ValidationError as error:
        problem = error.errors()[0]
        reason = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
    raise RequestError(f"clip {index} of the list cannot be sent to the ranks: {reason}")


def _as_list(values: object, name: str) -> list[Any]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {_kind(values)}")
    return list(values)


def _kind(value: object) -> str:
    return f"a value of type {type(value).__name__}"
