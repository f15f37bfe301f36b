"""The measurement of a bench: the pipeline and its baselines, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from svdpp.bench.compare import DATA_PARALLEL, ONE_DEVICE, PIPELINE
from svdpp.bench.config import BenchConfig, Workload
from svdpp.bench.targets import check_measurable
from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics.figures import RunFigures, measured_figures
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import Observer, OpenObserver, no_observer
from svdpp.driver.trace import Trace
from svdpp.errors import OutOfMemoryError
from svdpp.media.image import Photo
from svdpp.media.inputs import (
    EXAMPLE_PROMPT,
    ClipInput,
    check_inputs,
    example_photos,
    in_turn,
    numbered_prompt,
)
from svdpp.verification.reference import run_reference


@dataclass(kw_only=True)
class Round:
    """One measured case of one round, without its warm-up."""

    case: str
    number: int
    """Of the round, from 0."""
    trace: Trace
    figures: RunFigures
    latents_sha256: list[str]
    """By clip."""
    frames_sha256: list[str | None]


@dataclass
class Bench:
    """A configuration: its cases, and their measured rounds."""

    asked: BenchConfig
    config: PipelineConfig
    rounds: list[Round] = field(default_factory=list)
    out_of_memory: dict[str, OutOfMemoryError] = field(default_factory=dict)
    """The baselines that do not fit on the devices."""
    profile_path: Path | None = None
    """Of the torch.profiler trace; set it before the rounds end."""
    open_observer: OpenObserver = no_observer
    """Opens an observer for each round of each case; set it before `run`."""

    def __post_init__(self) -> None:
        self.requests = _requests(self.asked, self.config)
        self.asked = self.asked.resolved(self.config)
        self.cases = cases_of(self.config)
        has_gpu = self.config.device != "cpu"
        check_measurable(self.asked.targets, self.cases, has_gpu=has_gpu)

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

    def run(self, log: Callable[[str], None], keep: Callable[[Round], None]) -> None:
        """Measures every case once in each round, then profiles the pipeline if requested.

        A baseline's lack of memory is a result; every other error ends the bench. `keep` takes
        every measured round of a case.
        """
        for number, case in self.turns():
            title = f"round {number + 1} of {self.asked.measure.repeats}, {case}"
            try:
                done = self._measure(case, number, title)
            except OutOfMemoryError as error:
                if case == PIPELINE:
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
            path = None if self.profile_path is None else str(self.profile_path)
            with Pipeline(self.config, profile_path=path) as pipeline:
                pipeline.run(self.requests[:2])

    def _measure(self, case: str, number: int, title: str) -> Round:
        config = self.cases[case]
        # This many clips reach every rank: all replicas, and all decoders of each.
        num_routes = 1 if case == ONE_DEVICE else config.replicas * config.decoders
        num_warmups = self.asked.measure.warmups * num_routes
        warmups = [_warm_up(self.requests[i % len(self.requests)]) for i in range(num_warmups)]
        clips = [*warmups, *self.requests]
        trace = Trace(config.world_size, first_clip=num_warmups)
        schedule = config.layout.schedule(len(clips))
        with self.open_observer(title, schedule) as progress:
            observers: list[Observer] = [trace, progress]
            if case == ONE_DEVICE:
                made = run_reference(config, clips, observers=observers)[num_warmups:]
            else:
                pipeline = Pipeline(config)
                for observer in observers:
                    pipeline.observe(observer)
                with pipeline:
                    if warmups:
                        pipeline.run(warmups)
                    made = [result.metadata for result in pipeline.run(self.requests)]
        figures = measured_figures(trace, config, config.layout.schedule)
        assert figures is not None, "a round has a clip"
        return Round(
            case=case,
            number=number,
            trace=trace,
            figures=figures,
            latents_sha256=[clip["latents_sha256"] for clip in made],
            frames_sha256=[clip["frames_sha256"] for clip in made],
        )


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
    still = check_inputs([str(example_photos()[0])])[0]
    videos = tuple((name, still) for name in sampling.videos)
    return [
        ClipInput(image, prompt, workload.negative_prompt, videos)
        for image in images
        for prompt in prompts
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
