"""Owns the work messages for new clips: checked requests, each rank's actions and jobs."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.driver.clip_configs import ClipConfigs
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Action, Kind
from svdpp.plan.draft import check_draft_schedule
from svdpp.plan.schedule import Schedule, build_schedule, check_schedule
from svdpp.worker.messages import ClipJob, Work

_LATENTS_KEY = re.compile("[0-9a-f]{64}")


def schedule_clips(
    config: PipelineConfig, configs: ClipConfigs, requests: Sequence[ClipRequest], first: int
) -> Schedule:
    """Each rank's actions for `requests`, whose clips are numbered from `first`.

    A draft begins when the clips before it are done, and is done when those after it begin.

    Args:
        config: of the pipeline.
        configs: of the clips.
        requests: resolved.
        first: index of the first clip.

    Raises:
        RequestError: a clip has no route through the pipeline.
    """
    parts = [_schedule_group(config, configs, group) for group in _groups(config, requests, first)]
    ranks = range(config.world_size)
    return tuple(tuple(itertools.chain(*(part[rank] for part in parts))) for rank in ranks)


def _groups(
    config: PipelineConfig, requests: Sequence[ClipRequest], first: int
) -> list[dict[int, ClipRequest]]:
    """The requests by clip, cut where drafts begin or end."""
    numbered = enumerate(requests, first)
    groups = itertools.groupby(numbered, lambda pair: config.is_draft(pair[1]))
    return [dict(group) for _, group in groups]


def _schedule_group(
    config: PipelineConfig, configs: ClipConfigs, group: Mapping[int, ClipRequest]
) -> Schedule:
    """Each rank's actions for clips that are all drafts, or all not."""
    if _has_drafts(config, group):
        return config.draft_plan.schedule(group)
    routes = [configs.route(clip, request) for clip, request in group.items()]
    return build_schedule(routes, config.world_size)


def _has_drafts(config: PipelineConfig, group: Mapping[int, ClipRequest]) -> bool:
    return config.is_draft(next(iter(group.values())))


def check_requests(
    requests: ClipRequest | Iterable[ClipRequest],
    config: PipelineConfig,
    configs: ClipConfigs,
    checkpoint: Checkpoint | None,
    *,
    keeps_latents: bool,
) -> list[ClipRequest]:
    """`requests` as a list, checked and resolved: the ranks of `config` can make every clip.

    Args:
        requests: one or several.
        config: of the pipeline.
        configs: of the clips.
        checkpoint: of the model; None for the dummy model.
        keeps_latents: whether the pipeline has a folder of latent checkpoints.

    Raises:
        TypeError: an element is not a `ClipRequest`.
        RequestError: a clip lacks an input or a latent checkpoint that it needs, or has sampling
            parameters that the pipeline cannot run.
    """
    one = isinstance(requests, ClipRequest)
    found = []
    for index, request in enumerate([requests] if one else _as_list(requests, "requests")):
        name = "the clip" if one else f"clip {index} of the list"
        if not isinstance(request, ClipRequest):
            raise TypeError(f"{name} is {_kind(request)}, not a ClipRequest")
        resolved = configs.resolved(request)
        sampling = configs.of(resolved).sampling
        _check_request(name, resolved, config, checkpoint, sampling, keeps_latents)
        found.append(resolved)
    return found


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


def work_messages(
    config: PipelineConfig,
    configs: ClipConfigs,
    requests: Sequence[ClipRequest],
    metadata: Sequence[dict[str, Any]],
    *,
    first: int,
    keeps_latents: bool,
) -> dict[int, list[bytes]]:
    """The messages for each rank that has actions, by rank.

    Args:
        config: of the pipeline.
        configs: of the clips.
        requests: checked and resolved.
        metadata: one for each request.
        first: index of the first clip.
        keeps_latents: whether the pipeline has a folder of latent checkpoints.

    Raises:
        RequestError: a value in a request or its metadata cannot be sent to a rank, or a clip has
            no route through the pipeline.
    """
    pairs = zip(requests, metadata, strict=True)
    jobs = [_job(first, index, request, each) for index, (request, each) in enumerate(pairs)]
    messages: defaultdict[int, list[bytes]] = defaultdict(list)
    for group in _groups(config, requests, first):
        is_draft = _has_drafts(config, group)
        schedule = _schedule_group(config, configs, group)
        if is_draft:
            check_draft_schedule(schedule, config.sampling.num_inference_steps)
        else:
            num_steps = {clip: configs.num_steps(request) for clip, request in group.items()}
            check_schedule(schedule, num_steps)
        for rank, actions in enumerate(schedule):
            if actions:
                jobs_of_clips = {action.clip: jobs[action.clip - first] for action in actions}
                work = _work(actions, jobs_of_clips, is_draft, keeps_latents)
                messages[rank].append(work.to_bytes())
    return messages


def _work(
    actions: Sequence[Action], jobs: Mapping[int, ClipJob], is_draft: bool, keeps_latents: bool
) -> Work:
    """The work of one rank for `actions`, the jobs of whose clips are `jobs`."""
    # Only these ranks need the requests, and the metadata of many clips would slow the start.
    needed = {action.clip for action in actions if action.kind in (Kind.ENCODE, Kind.FINISH)}
    requests = {clip: job.request for clip, job in sorted(jobs.items())}
    keys = {clip: request.latents_key for clip, request in requests.items() if keeps_latents}
    samplings = {clip: request.sampling for clip, request in requests.items()}
    return Work(
        actions=tuple(actions),
        jobs=tuple(jobs[clip] for clip in sorted(needed)),
        latents_keys={clip: key for clip, key in keys.items() if key is not None},
        samplings={clip: own for clip, own in samplings.items() if own is not None},
        is_draft=is_draft,
    )


def _check_request(
    name: str,
    request: ClipRequest,
    config: PipelineConfig,
    checkpoint: Checkpoint | None,
    sampling: SamplingConfig,
    keeps_latents: bool,
) -> None:
    if request.draft and not config.draft_on_request:
        raise RequestError(
            f"{name} asks for a draft, but the pipeline makes none on request",
            "give its PipelineConfig draft=... and draft_on_request=True",
        )
    num_steps = sampling.num_inference_steps
    is_resumed = bool(request.done_steps) and not config.is_draft(request)
    if checkpoint is not None and not is_resumed:
        try:
            checkpoint.check_requests(sampling, [request])
        except RequestError as error:
            raise RequestError(
                f"{name}: {error.message}",
                "give its ClipRequest image=... or prompt=..., as the model needs",
            ) from error
    if is_resumed and not keeps_latents:
        raise RequestError(
            f"{name} has done_steps={request.done_steps}, but there are no latent checkpoints",
            "give the Pipeline the folder of the earlier run, as latents_folder=...",
        )
    if is_resumed and not 0 < request.done_steps <= num_steps:
        raise RequestError(f"{name}: done_steps must be 0 to {num_steps}, got {request.done_steps}")
    if request.latents_key is not None and not _LATENTS_KEY.fullmatch(request.latents_key):
        raise RequestError(f"{name}: latents_key must be 64 hex digits, got {request.latents_key}")


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
