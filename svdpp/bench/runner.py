"""The measurement of a bench: the pipeline and its baselines, in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from svdpp.bench.config import BenchConfig, Workload
from svdpp.bench.names import DATA_PARALLEL, ONE_DEVICE, PIPELINE
from svdpp.bench.targets import check_measurable
from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics.chrome_trace import TraceFile
from svdpp.diagnostics.figures import RunFigures
from svdpp.diagnostics.run_recorder import FigureRecorder
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import Observer, OpenObserver, no_observer
from svdpp.driver.trace import Trace
from svdpp.errors import OutOfMemoryError
from svdpp.launch.world import World, is_member
from svdpp.media.examples import EXAMPLE_PROMPT, example_photos, numbered_prompt
from svdpp.media.image import Photo
from svdpp.media.inputs import ClipInput, check_inputs, in_turn
from svdpp.plan.schedule import Schedule, build_schedule
from svdpp.verification.reference import run_reference
from svdpp.worker import memory
from svdpp.worker.messages import (
    ActionDone,
    ClipDone,
    Event,
    GpuSample,
    StepDone,
    TransferDone,
)


@dataclass(kw_only=True)
class Round:
    """One measured case of one round, without its warm-up."""

    case: str
    number: int
    """Of the round, from 0."""
    trace: Trace
    """Clips count from the number of the warm-up clips on."""
    figures: RunFigures
    latents_sha256: list[str]
    """By clip."""
    frames_sha256: list[str | None]


class Ranks:
    """The ranks of one pipeline after the other. A context manager.

    Launched ranks stay between two pipelines, where rank 0 may do other work, such as measuring
    diffusers. Meanwhile the others, which call `serve_all`, wait for the next pipeline, connected
    to rank 0, and end if it ends. They wait in the last one for the end of the block.

    Args:
        pipelines: creates each one when it is next, in the same order on all launched ranks.
        launched: whether a launcher started the ranks; else each pipeline starts its own.
    """

    def __init__(self, pipelines: Iterator[Pipeline], *, launched: bool = False) -> None:
        self.end_together = launched
        self._pipelines = pipelines
        self._next: Pipeline | None = None

    def __enter__(self) -> Ranks:
        self._gather()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._next is not None:  # else there are none, or a pipeline has failed with them
            self._next.dismiss(error)

    @contextlib.contextmanager
    def at_work(self, *observers: Observer) -> Iterator[Pipeline]:
        """Enters the next pipeline for a block."""
        pipeline = self._next if self.end_together else next(self._pipelines)
        assert pipeline is not None, "an earlier pipeline has failed"
        self._next = None
        for observer in observers:
            pipeline.observe(observer)
        with pipeline:
            yield pipeline
        self._gather()

    def check_alive(self, rank: int, event: Event) -> None:  # noqa: ARG002
        """Checks, as an observer of other work, launched ranks that wait for a pipeline."""
        if self._next is not None:
            self._next.check_gathered()

    def _gather(self) -> None:
        if self.end_together:
            memory.reset_peak()
            pipeline = next(self._pipelines)
            pipeline.gather()
            self._next = pipeline


def serve_all(pipelines: Iterable[Pipeline], serve: Callable[[Pipeline], None]) -> None:
    """Serves `pipelines` as a launched rank other than 0; the process ends in the last one."""
    for pipeline in pipelines:
        serve(pipeline)
        memory.reset_peak()


@dataclass
class Bench:
    """One point of a grid: its cases, and their measured rounds.

    Args:
        world: of the launcher that has started the ranks; None if this process starts them. A rank
            other than 0 measures nothing.
    """

    asked: BenchConfig
    config: PipelineConfig
    world: World | None = None
    rounds: list[Round] = field(default_factory=list)
    out_of_memory: dict[str, OutOfMemoryError] = field(default_factory=dict)
    """The baselines that do not fit on the devices."""
    profile_path: Path | None = None
    """Of the torch.profiler trace; set it before the rounds end."""
    trace_path: Path | None = None
    """Of the trace of the pipeline's last round."""
    open_observer: OpenObserver = no_observer
    """Opens an observer for each round of each case; set it before `run`."""

    def __post_init__(self) -> None:
        targets = self.asked.targets
        is_member_rank = is_member(self.world)
        self.requests = [] if is_member_rank else _requests(self.asked, self.config)
        self.asked = self.asked.resolved(self.config)
        self.cases = cases_of(self.config)
        has_gpu, is_dummy = self.config.device != "cpu", self.config.model.is_dummy
        check_measurable(targets, self.cases, has_gpu=has_gpu, is_dummy=is_dummy)

    def rounds_of(self, case: str) -> list[Round]:
        """The measured rounds of one case."""
        return [done for done in self.rounds if done.case == case]

    def turns(self) -> Iterator[tuple[int, str]]:
        """Round and case, in the order of measurement; each round begins with another case.

        A case that has run out of memory is left out of later rounds.
        """
        names = list(self.cases)
        for number in range(self.asked.measure.repeats):
            turn = number % len(names)
            for case in names[turn:] + names[:turn]:
                if case not in self.out_of_memory:
                    yield number, case

    def pipelines(self) -> Iterator[Pipeline]:
        """Creates the pipelines of all turns, and that of the profile, one at a time."""
        for _, case in self.turns():
            if case != ONE_DEVICE:
                yield Pipeline(self.cases[case])
        if self.asked.profile:
            path = self.profile_path
            yield Pipeline(self.config, profile_path=None if path is None else str(path))

    def run(
        self,
        log: Callable[[str], None],
        keep: Callable[[Round], None],
        ranks: Ranks | None = None,
    ) -> None:
        """Measures every case once in each round, then profiles the pipeline if requested.

        A baseline's lack of memory is a result; every other error ends the bench.

        Args:
            keep: takes every measured round of a case.
            ranks: of `pipelines`; None starts ranks for each pipeline.
        """
        ranks = ranks or Ranks(self.pipelines())
        for number, case in self.turns():
            title = f"round {number + 1} of {self.asked.measure.repeats}, {case}"
            try:
                done = self._measure(case, number, ranks, title)
            except OutOfMemoryError as error:
                if case == PIPELINE or (case != ONE_DEVICE and ranks.end_together):
                    raise
                self.out_of_memory[case] = error
                log(f"{title}: {error.message}")
                continue
            self.rounds.append(done)
            keep(done)
            figures = done.figures
            clips = f"{figures.clips} clips" if figures.clips > 1 else "1 clip"
            log(f"{title}: {clips} in {figures.makespan:.2f} s, first after "
                f"{figures.first_clip:.2f} s")  # fmt: skip
        if self.asked.profile:
            log("one clip under torch.profiler, in a separate run")
            with ranks.at_work() as pipeline:
                pipeline.run(self.requests[:2])

    def _measure(self, case: str, number: int, ranks: Ranks, title: str) -> Round:
        config = self.cases[case]
        # This many clips reach every rank: all replicas, and all decoders of each.
        num_routes = 1 if case == ONE_DEVICE else config.replicas * config.decoders
        num_warmups = self.asked.measure.warmups * num_routes
        warmups = [_warm_up(self.requests[i % len(self.requests)]) for i in range(num_warmups)]
        clips = [*warmups, *self.requests]
        listener = _Listener(config, num_warmups)
        schedule = schedule_of(config, len(clips))
        with self._trace(case, number) as file, self.open_observer(title, schedule) as progress:
            observers: list[Observer] = [listener, progress, *file]
            if case == ONE_DEVICE:
                run_reference(config, clips, observers=[*observers, ranks.check_alive])
            else:
                with ranks.at_work(*observers) as pipeline:
                    if warmups:
                        pipeline.run(warmups)
                    pipeline.run(self.requests)
        return listener.round(case, number)

    @contextlib.contextmanager
    def _trace(self, case: str, number: int) -> Iterator[Sequence[Observer]]:
        """The observer that writes the trace, if it is of this round."""
        if self.trace_path is None or (case, number + 1) != (PIPELINE, self.asked.measure.repeats):
            yield ()
            return
        about = {"round": number, "config_sha256": self.asked.sha256}
        file = TraceFile(self.trace_path, about)
        yield (file,)
        file.close()


def schedule_of(config: PipelineConfig, num_clips: int) -> Schedule:
    """What the ranks of a case do."""
    return build_schedule(config.layout.routes(range(num_clips)), config.world_size)


def cases_of(config: PipelineConfig) -> dict[str, PipelineConfig]:
    """The pipeline and its baselines; a pipeline that is data parallel itself has only one."""
    cases = {PIPELINE: config}
    if config.layout.replica_size > 1:
        apart = replace(
            config,
            split="uniform",
            replicas=config.world_size,
            decoders=1,
            cfg_parallel=1,
            decode_ranks=1,
        )
        cases[DATA_PARALLEL] = apart
    return {**cases, ONE_DEVICE: config.alone()}


class _Listener:
    """Records the ranks' events in a round, without the warm-up clips."""

    def __init__(self, config: PipelineConfig, num_warmups: int) -> None:
        trace = Trace(config.world_size)
        self._recorder = FigureRecorder(config, partial(schedule_of, config), trace=trace)
        self._first = num_warmups
        self._clips: dict[int, ClipDone] = {}

    def __call__(self, rank: int, event: Event) -> None:
        if self._is_measured(event):
            self._recorder(rank, event)
            if isinstance(event, ClipDone):
                self._clips[event.clip] = event

    def _is_measured(self, event: Event) -> bool:
        match event:
            case StepDone() | TransferDone() | ClipDone():
                return event.clip >= self._first
            case ActionDone():
                return event.action.clip >= self._first
            case GpuSample():
                return bool(self._recorder.trace.spans)
            case _:
                return True

    def round(self, case: str, number: int) -> Round:
        """What was measured."""
        figures = self._recorder.figures()
        assert figures is not None, "a round has a clip"
        metadata = [clip.metadata for _, clip in sorted(self._clips.items())]
        return Round(
            case=case,
            number=number,
            trace=self._recorder.trace,
            figures=figures,
            latents_sha256=[values["latents_sha256"] for values in metadata],
            frames_sha256=[values["frames_sha256"] for values in metadata],
        )


def pipelines_of(benches: Sequence[Bench]) -> Iterator[Pipeline]:
    """The pipelines of all points for launched ranks, and a last one in which they wait to end."""
    for bench in benches:
        yield from bench.pipelines()
    yield Pipeline(benches[-1].config)


def _requests(asked: BenchConfig, config: PipelineConfig) -> list[ClipRequest]:
    """All inputs with the first seed, then all with the second, and so on."""
    seeds, count = asked.measure.seeds, asked.workload.clips
    if config.model.is_dummy:
        return in_turn([ClipInput()], seeds, count)
    requests = in_turn(_inputs(asked.workload, config.sampling), seeds, count)
    if asked.workload.prompts is None and isinstance(config.sampling, PromptedSampling):
        return [
            replace(request, prompt=numbered_prompt(EXAMPLE_PROMPT, clip + 1))
            for clip, request in enumerate(requests)
        ]
    return requests


def _inputs(workload: Workload, sampling: SamplingConfig) -> list[ClipInput]:
    """Each image with each prompt; an image is None if clips start from text."""
    images: Sequence[Photo | None] = [None]
    if not isinstance(sampling, PromptedSampling) or sampling.from_image:
        given = workload.images or [str(path) for path in example_photos()]
        images = check_inputs(given, sampling.video_frames)
    prompts: Sequence[str | None] = workload.prompts or [None]
    return [
        ClipInput(image, prompt, workload.negative_prompt) for image in images for prompt in prompts
    ]


def _warm_up(request: ClipRequest) -> ClipRequest:
    """`request` with another prompt, because a rank encodes equal ones once."""
    return request if request.prompt is None else replace(request, prompt=f"{request.prompt} again")


def differing(rounds: Sequence[Round]) -> list[str]:
    """The cases, rounds and clips whose bits differ from the others'; empty if none do."""
    first = next((done for done in rounds if done.case == ONE_DEVICE), rounds[0])
    expected = list(zip(first.latents_sha256, first.frames_sha256, strict=True))
    return [
        f"{done.case}, round {done.number + 1}, clip {clip}"
        for done in rounds
        for clip, hashes in enumerate(zip(done.latents_sha256, done.frames_sha256, strict=True))
        if hashes != expected[clip]
    ]
