"""Owns measuring a bench: the pipeline, and beside it what it has to be better than, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from svdpp.bench.config import BenchConfig
from svdpp.bench.names import DATA_PARALLEL, ONE_DEVICE, PIPELINE
from svdpp.bench.ranks import Ranks, StartedRanks
from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import OpenObserver, no_observer
from svdpp.driver.trace import Trace
from svdpp.errors import OutOfMemoryError
from svdpp.media.examples import example_photos
from svdpp.media.inputs import check_inputs
from svdpp.plan.actions import Action
from svdpp.plan.schedule import Schedule, build_schedule
from svdpp.verification.reference import run_reference
from svdpp.worker.messages import (
    ActionDone,
    ClipDone,
    DraftDone,
    Event,
    Finished,
    Joined,
    StepDone,
    TransferDone,
)


@dataclass
class Round:
    """One case, started, warmed up, measured and ended; times are of the machine's monotonic clock.

    Args:
        case: which.
        number: of the round, from 0.
        num_warmups: clips before the measured ones, and so the index of the first of these.
        trace: of the measured clips alone.
    """

    case: str
    number: int
    num_warmups: int
    trace: Trace
    start_seconds: float = 0.0
    """Until every rank was ready, its model loaded."""
    load_seconds: dict[int, float] = field(default_factory=dict)
    """Of that for the model, by rank."""
    latents_sha256: dict[int, str] = field(default_factory=dict)
    """By clip, counted from the first measured one."""
    frames_sha256: dict[int, str | None] = field(default_factory=dict)
    draft_seconds: dict[int, float] = field(default_factory=dict)
    """By clip, of a draft: from its encode until the approximation was in its place."""
    peaks: dict[int, Finished] = field(default_factory=dict)
    """By rank; loading and warm-up included."""


class Bench:
    """One point of a grid: its cases, and what has been measured of them.

    Args:
        asked: every field a plain value.
        config: what the pipeline case runs, resolved.
        is_member: whether another rank measures, and this one has a part in it.

    Raises:
        InputError: an image cannot be read.
    """

    def __init__(
        self, asked: BenchConfig, config: PipelineConfig, *, is_member: bool = False
    ) -> None:
        self.config = config
        self.asked = asked.resolved(config)
        self.cases = cases_of(config)
        self.rounds: list[Round] = []
        self.out_of_memory: dict[str, OutOfMemoryError] = {}
        """Cases beside the pipeline that the devices cannot hold."""
        self.profile_path: Path | None = None
        """Of what torch.profiler sees; to be set before the measuring is over."""
        self.open_observer: OpenObserver = no_observer
        """Observes each round of each case; to be set before the measuring."""
        self.requests = [] if is_member else _requests(asked, config)

    def turns(self) -> Iterator[tuple[int, str]]:
        """Round and case, in the order in which they are measured: each round begins with another.

        Cases that the devices cannot hold are left out from then on.
        """
        names = list(self.cases)
        for number in range(self.asked.measure.repeats):
            turn = number % len(names)
            for case in names[turn:] + names[:turn]:
                if case not in self.out_of_memory:
                    yield number, case

    def pipelines(self) -> Iterator[Pipeline]:
        """The pipelines of all turns, and that of the profile, each as it is asked for."""
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
        """Measures every case once a round, and profiles the pipeline afterwards if that was asked.

        Args:
            talk: told what was measured.
            each: given every round of an case as it ends.
            ranks: take `pipelines` one after the other; None: they are started for each.

        Raises:
            SvdppError: what keeps an case from running; of those beside the pipeline, all but a
                lack of memory, which is itself a result.
        """
        ranks = ranks or StartedRanks(self.pipelines())
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
            log("one clip under torch.profiler, in a run of its own")
            with ranks.at_work() as pipeline:
                pipeline.run(self.requests[:2])

    def _measure(self, case: str, number: int, ranks: Ranks) -> Round:
        config = self.cases[case]
        # So many clips go through every rank: each replica's, each of its decoders'.
        visits = 1 if case == ONE_DEVICE else config.replicas * config.decoders
        num_warmups = self.asked.measure.warmups * visits
        warmups = [self.requests[i % len(self.requests)] for i in range(num_warmups)]
        done = Round(case, number, num_warmups, Trace(config.world_size))
        listener = _Listener(done)
        clips = [*warmups, *self.requests]
        with self.open_observer(
            self._place(case, number), _schedule(config, len(clips))
        ) as progress:
            if case == ONE_DEVICE:
                run_reference(config, clips, observers=(listener, progress, ranks.check_alive))
                return done
            with ranks.at_work(listener, progress) as pipeline:
                if warmups:
                    pipeline.run(warmups)
                pipeline.run(self.requests)
        return done

    def _place(self, case: str, number: int) -> str:
        return f"round {number + 1} of {self.asked.measure.repeats}, {case}"


def _schedule(config: PipelineConfig, num_clips: int) -> Schedule:
    """What the ranks of a case do, warming up included."""
    clips = range(num_clips)
    if config.draft is not None:
        return config.draft_plan.schedule(clips)
    return build_schedule(config.layout.routes(clips), config.world_size)


def cases_of(config: PipelineConfig) -> dict[str, PipelineConfig]:
    """What is measured beside each other; data parallel and one rank are their own baselines."""
    cases = {PIPELINE: config}
    if config.draft is not None or config.layout.replica_size > 1:
        alike = replace(config, split="uniform", replicas=config.world_size, decoders=1, draft=None)
        cases[DATA_PARALLEL] = alike
    return {**cases, ONE_DEVICE: config.alone()}


class _Listener:
    """Files what ranks report under its round, without the clips that warm up."""

    def __init__(self, done: Round) -> None:
        self._round = done
        self._first = done.num_warmups
        self._begun = time.monotonic()

    def __call__(self, rank: int, event: Event) -> None:
        match event:
            case Joined():
                self._round.start_seconds = time.monotonic() - self._begun
                self._round.load_seconds[rank] = event.load_seconds
                self._round.trace.add(rank, event)
            case Finished():
                self._round.peaks[rank] = event
            case ClipDone() if event.clip >= self._first:
                clip = event.clip - self._first
                self._round.latents_sha256[clip] = event.metadata["latents_sha256"]
                self._round.frames_sha256[clip] = event.metadata["frames_sha256"]
            case DraftDone() if event.clip >= self._first:
                self._round.draft_seconds[event.clip - self._first] = event.metadata["wall_seconds"]
            case StepDone() | TransferDone() if event.clip >= self._first:
                self._round.trace.add(rank, event)
            case ActionDone() if Action.parse(event.action).clip >= self._first:
                self._round.trace.add(rank, event)
            case _:
                pass


def pipelines_of(benches: Sequence[Bench]) -> Iterator[Pipeline]:
    """Those of all points, for a launcher's ranks; and one at whose line they hear of the end."""
    for one in benches:
        yield from one.pipelines()
    yield Pipeline(benches[-1].config)


def _requests(asked: BenchConfig, config: PipelineConfig) -> list[ClipRequest]:
    """All images with the first seed, then all with the second, and so on."""
    seeds, count = asked.measure.seeds, asked.workload.clips
    if config.model.is_dummy:
        return [ClipRequest(seed=seeds[clip % len(seeds)]) for clip in range(count)]
    found = check_inputs(asked.workload.images or [str(p) for p in example_photos()])
    return [
        ClipRequest(
            seed=seeds[clip // len(found) % len(seeds)],
            image=str(found[clip % len(found)].path),
            image_sha256=found[clip % len(found)].sha256,
        )
        for clip in range(count)
    ]


def _words(trace: Trace) -> str:
    times = trace.summary()
    clips = f"{times.clips} clips" if times.clips > 1 else "1 clip"
    return f"{clips} in {times.makespan:.2f} s, first after {times.first_clip:.2f} s"


def differing(rounds: Sequence[Round]) -> list[str]:
    """Which cases, in which round, made a clip whose bits differ from the others'; empty: none."""
    first = next((each for each in rounds if each.case == ONE_DEVICE), rounds[0])
    return [
        f"{each.case}, round {each.number + 1}, clip {clip}"
        for each in rounds
        for clip, sha256 in sorted(each.latents_sha256.items())
        if (sha256, each.frames_sha256[clip])
        != (first.latents_sha256[clip], first.frames_sha256[clip])
    ]
