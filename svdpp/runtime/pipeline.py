"""Owns the parent's view: ranks started once, clips given as they come, results as they finish."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.distributed import process_group
from svdpp.distributed.launch import Group, JoinedGroup, StartedGroup, serve_joined
from svdpp.media import place
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Forecast, replay, summarise
from svdpp.plan.schedule import Schedule, build_schedule, check_schedule, pipeline_routes
from svdpp.runtime.faults import PlantedFault
from svdpp.runtime.messages import ClipDone, ClipJob, Event, Work
from svdpp.runtime.rank import RankSetup, Roles, rank_main
from svdpp.runtime.supervisor import Observer, Supervisor
from svdpp.runtime.trace import Trace
from svdpp.runtime.watch import Watch


@dataclass(frozen=True)
class ClipResult:
    """A finished clip.

    Args:
        clip: index, counted from the first one submitted.
        request: what was asked for.
        record: the clip's JSON: parameters, hashes, times.
    """

    clip: int
    request: ClipRequest
    record: dict[str, Any]


class Pipeline:
    """Ranks that share the steps of every clip. A context manager: ranks live inside the block.

    Under torchrun the ranks are joined instead of started. There only rank 0 enters the block;
    the others call `serve`.

    Args:
        config: what to run; frame count and decode chunk are resolved against the model here.
        evidence_folder: where each hand-over's latent and the frames are kept, for verification.
        fault: planted damage, to see that it is noticed.
        start_method: `forkserver` or `spawn`.

    Raises:
        RequestError: devices or backend are not there, or do not fit the request.
        ModelError: the model cannot be found, or is not whole.
    """

    def __init__(
        self,
        config: PipelineConfig,
        *,
        evidence_folder: str | None = None,
        fault: PlantedFault | None = None,
        start_method: str = "forkserver",
    ) -> None:
        self._world = process_group.torchrun_world()
        self.backend = process_group.choose_backend(config.device, config.world_size)
        process_group.check_devices(config.device, config.world_size)
        self.config, self.checkpoint = resolve(config)
        self._observers: list[Observer] = [self._collect]
        self._start_method = start_method
        self._setup = RankSetup(
            config=self.config,
            checkpoint=self.checkpoint,
            roles=_roles(self.config),
            hops=tuple((rank, rank + 1) for rank in range(config.world_size - 1)),
            evidence_folder=evidence_folder,
            fault=fault,
        )
        self._supervisor: Supervisor | None = None
        self._requests: list[ClipRequest] = []
        self._finished: list[ClipResult] = []
        self._num_returned = 0

    @property
    def is_member(self) -> bool:
        """Whether this process is a rank other than 0 of torchrun's world, and is to `serve`."""
        return self._world is not None and self._world.rank != 0

    @property
    def trace(self) -> Trace:
        """What has been measured so far, inside the block or after it."""
        return self._entered.trace

    def observe(self, observer: Observer) -> None:
        """Has `observer` called with (rank, event) for all that ranks report; before the block."""
        self._observers.append(observer)

    def serve(self) -> None:
        """Works as a member of torchrun's world until rank 0 says that all is done."""
        assert self._world is not None
        serve_joined(rank_main, self._setup, world=self._world, backend=self.backend)

    def __enter__(self) -> Pipeline:
        self._supervisor = Supervisor(
            self._open_group(),
            new_watch(self.config),
            device=self.config.device,
            observers=tuple(self._observers),
        )
        try:
            self._supervisor.wait_joined()
        except BaseException:
            self._supervisor.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._entered.stop(self.config.timeout_seconds)
        finally:
            self._entered.kill()
            for folder in {Path(r.output.path).parent for r in self._requests if r.output}:
                place.remove_abandoned(folder)  # what a rank was writing that could not clean up

    def submit(
        self, requests: Iterable[ClipRequest], records: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Gives the ranks further clips, to be done after those they have.

        Args:
            requests: one for each clip.
            records: what each clip's JSON is to say of the request; empty for nothing.
        """
        requests = list(requests)
        first = len(self._requests)
        self._requests += requests
        jobs = tuple(
            ClipJob(clip=first + index, request=request, record=records[index] if records else {})
            for index, request in enumerate(requests)
        )
        schedule = self.schedule(job.clip for job in jobs)
        check_schedule(schedule, self.config.sampling.num_inference_steps)
        for rank, actions in enumerate(schedule):
            # Ranks between need no request, and many clips' records would weigh on the start.
            needed = {a.clip for a in actions if a.kind in (Kind.ENCODE, Kind.DELIVER)}
            own = tuple(job for job in jobs if job.clip in needed)
            self._entered.send(rank, Work(actions=tuple(map(str, actions)), jobs=own))

    def schedule(self, clips: Iterable[int]) -> Schedule:
        """Each rank's actions for `clips`: what `submit` sends, and what a forecast replays."""
        routes = pipeline_routes(self.config.ranges, clips, decodes=self.config.decodes)
        return build_schedule(routes, self.config.world_size)

    def forecast(self, num_clips: int) -> Forecast:
        """What the plan promises for `num_clips`, at the mean costs measured so far."""
        return summarise(
            replay(self.schedule(range(num_clips)), self.trace.costs()), self.config.world_size
        )

    def results(self) -> Iterator[ClipResult]:
        """Yields every submitted clip not yet returned, as it finishes.

        Raises:
            SvdppError: what ended the run; clips finished before stay finished.
        """
        while self._num_returned < len(self._requests):
            while self._num_returned == len(self._finished):
                self._entered.step()
            self._num_returned += 1
            yield self._finished[self._num_returned - 1]

    def run(
        self, requests: Iterable[ClipRequest], records: Sequence[dict[str, Any]] = ()
    ) -> list[ClipResult]:
        """Submits `requests` and waits for all of them; in the order of the requests."""
        self.submit(requests, records)
        return sorted(self.results(), key=lambda result: result.clip)

    @property
    def _entered(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("the pipeline has no ranks: use it inside a with block")
        return self._supervisor

    def _collect(self, rank: int, event: Event) -> None:  # noqa: ARG002
        if isinstance(event, ClipDone):
            request = self._requests[event.clip]
            self._finished.append(ClipResult(event.clip, request, event.record))

    def _open_group(self) -> Group:
        if self._world is not None:
            return JoinedGroup(rank_main, self._setup, world=self._world, backend=self.backend)
        quiet_libraries()
        return StartedGroup(
            rank_main,
            self._setup,
            world_size=self.config.world_size,
            backend=self.backend,
            preload=["svdpp.runtime.rank", *(["svdpp.models.svd"] if self.checkpoint else [])],
            start_method=self._start_method,
        )


def quiet_libraries() -> None:
    """Keeps the libraries' chatter out of ranks that are started after this, unless asked for.

    By the environment, since they speak while they are imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")


def new_watch(config: PipelineConfig) -> Watch:
    """A watch with the config's deadlines, begun now."""
    return Watch(
        config.world_size,
        time.monotonic(),
        start_timeout=config.start_timeout_seconds,
        stale=config.stale_seconds,
        timeout=config.timeout_seconds,
    )


def resolve(config: PipelineConfig) -> tuple[PipelineConfig, Checkpoint | None]:
    """`config` with frame count and decode chunk as numbers, and the checkpoint they are of.

    Raises:
        ModelError: the model cannot be found, or is not whole.
    """
    if config.model.is_dummy:
        frames = config.model.dummy_latent_shape[2]
        return replace(config, sampling=config.sampling.resolved(model_frames=frames)), None
    checkpoint = find_checkpoint(config.model)
    sampling = config.sampling.resolved(model_frames=checkpoint.num_frames)
    return replace(config, sampling=sampling), checkpoint


def _roles(config: PipelineConfig) -> tuple[Roles, ...]:
    """What each rank's actions will need of the model."""
    last = config.world_size - 1
    return tuple(
        Roles(
            encode=part.rank == 0,
            denoise=part.num_steps > 0,
            decode=part.rank == last and config.decodes,
        )
        for part in config.ranges
    )
