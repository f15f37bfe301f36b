"""Owns the parent's view: ranks started once, clips given as they come, results as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.liveness import Liveness
from svdpp.driver.memory_check import check_memory
from svdpp.driver.rank_launcher import RankLauncher
from svdpp.driver.shared_settings import silence_limit
from svdpp.driver.supervisor import Observer, Supervisor
from svdpp.driver.trace import Trace
from svdpp.errors import InputError, Interrupted, SvdppError, error_from_dict
from svdpp.launch import process_group
from svdpp.launch.world import find_world
from svdpp.media import output_files
from svdpp.media.image import read_bytes
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.plan.actions import Kind
from svdpp.plan.draft import check_draft_schedule
from svdpp.plan.forecast import Forecast, Span, replay, summarise
from svdpp.plan.schedule import Schedule, build_schedule, check_schedule
from svdpp.worker.fault_injection import InjectedFault
from svdpp.worker.latent_checkpoints import prune
from svdpp.worker.messages import (
    Cancel,
    ClipDone,
    ClipFailed,
    ClipJob,
    Event,
    PhotoWanted,
    StoredTensor,
    Work,
)
from svdpp.worker.rank import RankSetup
from svdpp.worker.tensor_store import TensorStore


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


@dataclass(frozen=True)
class ClipFailure:
    """A clip that is lost, for a reason of its own.

    Args:
        clip: index, counted from the first one submitted.
        request: what was asked for.
        error: why there is no clip.
    """

    clip: int
    request: ClipRequest
    error: SvdppError


class Pipeline:
    """Ranks that share the steps of every clip. A context manager: ranks live inside the block.

    Under torchrun or srun the ranks are joined instead of started. There only rank 0 enters the
    block; the others call `serve`.

    Args:
        config: what to run; frame count and decode chunk are resolved against the model here.
        tensor_folder: where each hand-over's latent and the frames are kept, for verification.
        latents folder: where each hand-over's packet is kept until its clip is finished, for
            clips with a `latents_key`; read for clips with `done_steps`.
        profile_path: of the file that gets rank 0's view of one clip by torch.profiler.
        output_folder: where this host puts its clips, whatever their requests say; for ranks that
            others have started, each host its own.
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
        tensor_folder: str | None = None,
        latents_folder: str | None = None,
        profile_path: str | None = None,
        output_folder: str | None = None,
        fault: InjectedFault | None = None,
        start_method: str = "forkserver",
    ) -> None:
        world = find_world()
        self.backend = process_group.choose_backend(config.device, config.world_size)
        on_this_host = config.world_size if world is None else world.local_size
        process_group.check_devices(config.device, on_this_host)
        self.config, self.checkpoint = resolve(config)
        self._observers: list[Observer] = [self._collect]
        self._setup = RankSetup(
            config=self.config,
            checkpoint=self.checkpoint,
            roles=self.config.plan.roles,
            links=self.config.plan.links,
            tensor_folder=tensor_folder,
            latents_folder=latents_folder,
            profile_path=profile_path,
            output_folder=None if world is None else output_folder,
            fault=fault,
        )
        self._launcher = RankLauncher(self._setup, self.backend, start_method)
        self._supervisor: Supervisor | None = None
        self._requests: list[ClipRequest] = []
        self._finished: list[ClipResult] = []
        # An accepted draft may settle a clip whose exact path comes to harm meanwhile.
        self._settled: set[int] = set()
        self._num_returned = 0
        self.failures: list[ClipFailure] = []
        """Clips that were lost, each for a reason of its own, in the order in which that showed."""

    @property
    def is_member(self) -> bool:
        """Whether this process is a rank other than 0 of a launcher's world, and is to `serve`."""
        return self._launcher.world is not None and self._launcher.world.is_member

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks are on other hosts than this one."""
        return self._launcher.world is not None and self._launcher.world.spans_hosts

    @property
    def trace(self) -> Trace:
        """What has been measured so far, inside the block or after it."""
        return self._entered.trace

    def observe(self, observer: Observer) -> None:
        """Has `observer` called with (rank, event) for all that ranks report; before the block."""
        self._observers.append(observer)

    def serve(
        self,
        *,
        say: Callable[[str, bool], None],
        answer: Callable[[bytes], bytes] = lambda _: b"",
    ) -> None:
        """Works as a member of a launcher's world until rank 0 says that all is done.

        Observers hear of this rank's events alone. Where the run does not end well, the process
        ends here.

        Args:
            say: takes the sentence with which it does, and whether nobody else will say it.
            answer: answers what rank 0 wants to know of this host before the work begins.

        Raises:
            SvdppError: the work could not begin.
        """
        self._launcher.serve(self._observers[1:], answer, say)

    def ask(self, question: bytes) -> dict[str, bytes]:
        """What one rank of each other host answers to `question`, by host; before the block.

        Raises:
            SvdppError: a rank is not there, or was started in another way.
        """
        return self._launcher.join().ask(question)

    def gather(self) -> None:
        """Has a launcher's other ranks wait for this pipeline's work; before the block.

        From then on they end with rank 0 and know why, whatever it does meanwhile.

        Raises:
            SvdppError: a rank is not there, or was started in another way.
        """
        self._launcher.join()

    def check_gathered(self) -> None:
        """Looks whether those that `gather` has found are still there; before the block.

        Raises:
            RankError: one of them is not.
        """
        self._launcher.join().check_there()

    def dismiss(self, error: BaseException | None = None) -> None:
        """Sends a launcher's other ranks away; instead of the block.

        Args:
            error: why; None: there is nothing to do.

        Raises:
            SvdppError: a rank is not there, or was started in another way.
        """
        self._launcher.dismiss(error)

    def __enter__(self) -> Pipeline:
        world = self._launcher.world
        on_this_host = self.config.world_size if world is None else world.local_size
        check_memory(self.config, self.checkpoint, self._setup.roles[:on_this_host])
        self._supervisor = Supervisor(
            self._launcher.open(),
            new_liveness(self.config),
            device=self.config.device,
            observers=tuple(self._observers),
        )
        try:
            self._supervisor.wait_joined()
        except BaseException as error:
            self._supervisor.kill(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        reason = error
        try:
            if kind is None:
                self._entered.stop(self.config.timeout_seconds)
            elif isinstance(error, Interrupted) and self._launcher.world is not None:
                self._entered.explain()  # a launcher ends rank 0 as well when another rank has died
        except BaseException as failure:
            reason = failure
            raise
        finally:
            self._entered.kill(reason)
            self._tidy()

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
        schedule = self.schedule(requests, first=first)
        check = check_schedule if self.config.draft is None else check_draft_schedule
        check(schedule, self.config.sampling.num_inference_steps)
        for rank, actions in enumerate(schedule):
            # Ranks between need no request, and many clips' records would weigh on the start.
            needed = {a.clip for a in actions if a.kind in (Kind.ENCODE, Kind.FINISH)}
            work = Work(
                actions=tuple(map(str, actions)),
                jobs=tuple(job for job in jobs if job.clip in needed),
                latents_keys=self._latents_keys({action.clip for action in actions}),
            )
            self._entered.send(rank, work)

    def schedule(self, requests: Sequence[ClipRequest], *, first: int = 0) -> Schedule:
        """Each rank's actions: what `submit` sends, and what a forecast replays.

        Args:
            requests: clips that an earlier run has begun go on where it stood.
            first: index of the first one.
        """
        clips = range(first, first + len(requests))
        if self.config.draft is not None:
            return self.config.draft_plan.schedule(clips)
        routes = [
            route.resumed(request.done_steps) if request.done_steps else route
            for route, request in zip(self.config.layout.routes(clips), requests, strict=True)
        ]
        return build_schedule(routes, self.config.world_size)

    def forecast(self) -> Forecast:
        """What the plan promises for the clips submitted.

        At the mean costs measured so far; where the dummy sleeps, at those it was given.
        """
        return summarise(self.replayed(), self.config.world_size)

    def replayed(self) -> list[Span]:
        """When each rank would do what, by the same plan and costs as the forecast."""
        costs = self.config.costs if self.config.model.dummy_sleeps else self.trace.costs()
        return replay(self.schedule(self._requests), costs)

    def results(self) -> Iterator[ClipResult]:
        """Yields every submitted clip not yet returned, as it finishes.

        Clips that are lost for a reason of their own are not among them but in `failures`.

        Raises:
            SvdppError: what ended the run, after all clips that were finished before.
        """
        ended: SvdppError | None = None
        while self._num_returned + len(self.failures) < len(self._requests):
            while self._num_returned < len(self._finished):
                self._num_returned += 1
                yield self._finished[self._num_returned - 1]
            if ended is not None:
                raise ended
            if self._num_returned + len(self.failures) < len(self._requests):
                try:
                    self._entered.step()
                except SvdppError as error:
                    ended = error  # what was finished in the same breath comes first

    def run(
        self, requests: Iterable[ClipRequest], records: Sequence[dict[str, Any]] = ()
    ) -> list[ClipResult]:
        """Submits `requests` and waits for all of them; in the order of the requests.

        Raises:
            SvdppError: what ended the run, or after all other clips the first one's that was lost.
        """
        self.submit(requests, records)
        results = sorted(self.results(), key=lambda result: result.clip)
        if self.failures:
            raise self.failures[0].error
        return results

    @property
    def _entered(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("the pipeline has no ranks: use it inside a with block")
        return self._supervisor

    def _collect(self, rank: int, event: Event) -> None:
        if isinstance(event, StoredTensor):
            assert self._setup.tensor_folder is not None
            TensorStore(Path(self._setup.tensor_folder)).put(event.name, event.data)
        if isinstance(event, PhotoWanted):
            self._entered.send_file(rank, _bytes_of(self._requests[event.clip]))
        if not isinstance(event, ClipDone | ClipFailed) or event.clip in self._settled:
            return
        self._settled.add(event.clip)
        request = self._requests[event.clip]
        if isinstance(event, ClipFailed):
            self.failures.append(ClipFailure(event.clip, request, error_from_dict(event.error)))
            return
        self._finished.append(ClipResult(event.clip, request, event.record))
        self._prune(request)
        if event.record.get("exact") is False:
            for other in range(self.config.world_size):
                self._entered.send(other, Cancel(clip=event.clip))

    def _latents_keys(self, clips: set[int]) -> dict[int, str]:
        """The keys of those of `clips` that have one, where packets are kept at all."""
        if self._setup.latents_folder is None:
            return {}
        keys = ((clip, self._requests[clip].latents_key) for clip in sorted(clips))
        return {clip: key for clip, key in keys if key is not None}

    def _tidy(self) -> None:
        """Removes what ranks that are gone were still writing, or kept too late to be pruned."""
        for result in self._finished:
            self._prune(result.request)
        folders = {Path(r.output.path).parent for r in self._requests if r.output}
        if self._setup.latents_folder is not None:
            folders.add(Path(self._setup.latents_folder))
        for folder in folders:
            output_files.remove_abandoned(folder)

    def _prune(self, request: ClipRequest) -> None:
        """Removes the packets of a clip that is finished."""
        if self._setup.latents_folder is not None and request.latents_key is not None:
            prune(Path(self._setup.latents_folder), request.latents_key)


def _bytes_of(request: ClipRequest) -> bytes:
    """A clip's photograph, for a rank on another host; nothing where it cannot be read any more."""
    assert request.image is not None
    try:
        return read_bytes(Path(request.image))
    except InputError:
        return b""


def new_liveness(config: PipelineConfig) -> Liveness:
    """A watch with the config's deadlines, begun now."""
    return Liveness(
        config.world_size,
        time.monotonic(),
        start_timeout=config.start_timeout_seconds,
        heartbeat_timeout=silence_limit(config),
        timeout=config.timeout_seconds,
    )


def resolve(
    config: PipelineConfig, *, weights: bool = True
) -> tuple[PipelineConfig, Checkpoint | None]:
    """`config` with frame count and decode chunk as numbers, and the checkpoint they are of.

    Args:
        config: of the run.
        weights: whether they have to be there, too; else the model's configs are enough.

    Raises:
        ModelError: the model cannot be found, or is not whole.
    """
    if config.model.is_dummy:
        frames = config.model.dummy_latent_shape[2]
        return replace(config, sampling=config.sampling.resolved(model_frames=frames)), None
    checkpoint = find_checkpoint(config.model, weights=weights)
    sampling = config.sampling.resolved(model_frames=checkpoint.num_frames)
    return replace(config, sampling=sampling), checkpoint
