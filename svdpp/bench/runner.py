"""The measurement of a bench: the pipeline and its baselines, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from svdpp.bench.config import BenchConfig, Workload
from svdpp.bench.names import DATA_PARALLEL, ONE_DEVICE, PIPELINE
from svdpp.bench.ranks import Ranks
from svdpp.bench.targets import check_measurable
from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics.figures import RunFigures
from svdpp.diagnostics.run_recorder import FigureRecorder
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import OpenObserver, no_observer
from svdpp.driver.trace import Trace
from svdpp.errors import OutOfMemoryError
from svdpp.launch.world import World, is_member
from svdpp.media.examples import EXAMPLE_PROMPT, example_photos, numbered_prompt
from svdpp.media.image import Photo
from svdpp.media.inputs import ClipInput, check_inputs
from svdpp.plan.schedule import Schedule, build_schedule
from svdpp.verification.reference import run_reference
from svdpp.worker.messages import (
    ActionDone,
    ClipDone,
    Event,
    Finished,
    GpuSample,
    Joined,
    StepDone,
    TransferDone,
)


@dataclass
class Round:
    """One measured case of one round; times are by the machine's monotonic clock.

    Args:
        case: its name.
        number: of the round, from 0.
        num_warmups: clips before the measured ones, which is the index of the first measured one.
        trace: of the measured clips only.
    """

    case: str
    number: int
    num_warmups: int
    trace: Trace
    start_seconds: float = 0.0
    """Until every rank was ready, with its model loaded."""
    load_seconds: dict[int, float] = field(default_factory=dict)
    """The part of that for loading the model, by rank."""
    latents_sha256: dict[int, str] = field(default_factory=dict)
    """By clip, counted from the first measured one."""
    frames_sha256: dict[int, str | None] = field(default_factory=dict)
    peaks: dict[int, Finished] = field(default_factory=dict)
    """By rank; includes loading and warm-up."""
    figures: RunFigures | None = None
    """For `svdpp report`."""


class Bench:
    """One point of a grid: its cases, and their measured rounds.

    Args:
        asked: the point.
        config: of the pipeline case, resolved.
        world: of the launcher that has started the ranks; None if this process starts them. A rank
            other than 0 measures nothing.
    """

    def __init__(
        self, asked: BenchConfig, config: PipelineConfig, world: World | None = None
    ) -> None:
        self.config = config
        self.world = world
        self.asked = asked.resolved(config)
        self.cases = cases_of(config)
        check_measurable(
            asked.targets,
            self.cases,
            has_gpu=config.device != "cpu",
            is_dummy=config.model.is_dummy,
        )
        self.rounds: list[Round] = []
        self.out_of_memory: dict[str, OutOfMemoryError] = {}
        """The baselines that do not fit on the devices."""
        self.profile_path: Path | None = None
        """Of the torch.profiler trace; set it before the rounds end."""
        self.open_observer: OpenObserver = no_observer
        """Opens an observer for each round of each case; set it before `run`."""
        self.requests = [] if is_member(world) else _requests(asked, config)

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
        each: Callable[[Round], None],
        ranks: Ranks | None = None,
    ) -> None:
        """Measures every case once in each round, then profiles the pipeline if requested.

        Args:
            log: takes a line for each measurement.
            each: takes every measured round of a case.
            ranks: of `pipelines`; None starts ranks for each pipeline.

        Raises:
            SvdppError: a case failed; for a baseline, a lack of memory is a result instead.
        """
        ranks = ranks or Ranks(self.pipelines())
        for number, case in self.turns():
            place = self._place(case, number)
            try:
                done = self._measure(case, number, ranks)
            except OutOfMemoryError as error:
                if case == PIPELINE or (case != ONE_DEVICE and ranks.end_together):
                    raise
                self.out_of_memory[case] = error
                log(f"{place}: {error.message}")
                continue
            self.rounds.append(done)
            each(done)
            log(f"{place}: {_words(done.trace)}")
        if self.asked.profile:
            log("one clip under torch.profiler, in a separate run")
            with ranks.at_work() as pipeline:
                pipeline.run(self.requests[:2])

    def _measure(self, case: str, number: int, ranks: Ranks) -> Round:
        config = self.cases[case]
        # This many clips reach every rank: all replicas, and all decoders of each.
        num_routes = 1 if case == ONE_DEVICE else config.replicas * config.decoders
        num_warmups = self.asked.measure.warmups * num_routes
        warmups = [_warm_up(self.requests[i % len(self.requests)]) for i in range(num_warmups)]
        done = Round(case, number, num_warmups, Trace(config.world_size))
        recorder = FigureRecorder(config, partial(schedule_of, config), trace=done.trace)
        listener = _Listener(done, recorder)
        clips = [*warmups, *self.requests]
        with self.open_observer(
            self._place(case, number), schedule_of(config, len(clips))
        ) as progress:
            if case == ONE_DEVICE:
                run_reference(config, clips, observers=(listener, progress, ranks.check_alive))
            else:
                with ranks.at_work(listener, progress) as pipeline:
                    if warmups:
                        pipeline.run(warmups)
                    pipeline.run(self.requests)
        done.figures = recorder.figures()
        return done

    def _place(self, case: str, number: int) -> str:
        return f"round {number + 1} of {self.asked.measure.repeats}, {case}"


def schedule_of(config: PipelineConfig, num_clips: int) -> Schedule:
    """What the ranks of a case do."""
    return build_schedule(config.layout.routes(range(num_clips)), config.world_size)


def cases_of(config: PipelineConfig) -> dict[str, PipelineConfig]:
    """The pipeline and its baselines; a pipeline that is data parallel itself has only one."""
    cases = {PIPELINE: config}
    if config.layout.replica_size > 1:
        alike = replace(config, split="uniform", replicas=config.world_size, decoders=1)
        cases[DATA_PARALLEL] = alike
    return {**cases, ONE_DEVICE: config.alone()}


class _Listener:
    """Records the ranks' events in a round, without the warm-up clips."""

    def __init__(self, done: Round, recorder: FigureRecorder) -> None:
        self._round, self._recorder = done, recorder
        self._first = done.num_warmups
        self._begun = time.monotonic()

    def __call__(self, rank: int, event: Event) -> None:
        if not self._is_measured(event):
            return
        self._recorder(rank, event)
        match event:
            case Joined():
                self._round.start_seconds = time.monotonic() - self._begun
                self._round.load_seconds[rank] = event.load_seconds
            case Finished():
                self._round.peaks[rank] = event
            case ClipDone():
                clip = event.clip - self._first
                self._round.latents_sha256[clip] = event.metadata["latents_sha256"]
                self._round.frames_sha256[clip] = event.metadata["frames_sha256"]
            case _:
                pass

    def _is_measured(self, event: Event) -> bool:
        match event:
            case StepDone() | TransferDone() | ClipDone():
                return event.clip >= self._first
            case ActionDone():
                return event.action.clip >= self._first
            case GpuSample():
                return bool(self._round.trace.spans)
            case _:
                return True


def pipelines_of(benches: Sequence[Bench]) -> Iterator[Pipeline]:
    """The pipelines of all points for launched ranks, and a last one in which they wait to end."""
    for one in benches:
        yield from one.pipelines()
    yield Pipeline(benches[-1].config)


def _requests(asked: BenchConfig, config: PipelineConfig) -> list[ClipRequest]:
    """All inputs with the first seed, then all with the second, and so on."""
    seeds, count = asked.measure.seeds, asked.workload.clips
    if config.model.is_dummy:
        return [ClipRequest(seed=seeds[clip % len(seeds)]) for clip in range(count)]
    found = _inputs(asked.workload, config.sampling)
    requests = [
        found[clip % len(found)].request(seeds[clip // len(found) % len(seeds)])
        for clip in range(count)
    ]
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
        images = check_inputs(workload.images or [str(path) for path in example_photos()])
    prompts: Sequence[str | None] = workload.prompts or [None]
    return [
        ClipInput(image, prompt, workload.negative_prompt) for image in images for prompt in prompts
    ]


def _warm_up(request: ClipRequest) -> ClipRequest:
    """`request` with another prompt, because a rank encodes equal ones once."""
    return request if request.prompt is None else replace(request, prompt=f"{request.prompt} again")


def _words(trace: Trace) -> str:
    times = trace.summary()
    clips = f"{times.clips} clips" if times.clips > 1 else "1 clip"
    return f"{clips} in {times.makespan:.2f} s, first after {times.first_clip:.2f} s"


def differing(rounds: Sequence[Round]) -> list[str]:
    """The cases, rounds and clips whose bits differ from the others'; empty if none do."""
    first = next((each for each in rounds if each.case == ONE_DEVICE), rounds[0])
    return [
        f"{each.case}, round {each.number + 1}, clip {clip}"
        for each in rounds
        for clip, sha256 in sorted(each.latents_sha256.items())
        if (sha256, each.frames_sha256[clip])
        != (first.latents_sha256[clip], first.frames_sha256[clip])
    ]
