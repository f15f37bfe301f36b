"""Run of a benchmark: rounds in which each case is measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from svdpp.bench.config import BenchConfig, Workload
from svdpp.bench.targets import DATA_PARALLEL, ONE_DEVICE, PIPELINE, check_measurable
from svdpp.config import ClipRequest, PipelineConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics.run_metrics import RunMetrics, collect_run_metrics
from svdpp.diagnostics.utilisation import count_flops, peak_tflops
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import Observer, OpenObserver, no_observer
from svdpp.driver.trace import Trace
from svdpp.errors import OutOfMemoryError
from svdpp.launch.gpus import visible_gpus
from svdpp.launch.world import find_world
from svdpp.media.images import MediaFile
from svdpp.media.inputs import ClipInput, check_inputs, example_images, example_prompt, round_robin
from svdpp.plan.costs import PartFlops
from svdpp.verification.verify import run_reference
from svdpp.worker.device import reset_peak

# Seconds for which the ranks other than rank 0 wait for the next pipeline: a week, which is longer
# than rank 0 needs to measure diffusers.
_BETWEEN_PIPELINES_SECONDS = 7 * 86400.0


@dataclass(kw_only=True)
class Round:
    """Measurements of one case (pipeline or baseline) in one round, without warm-up clips."""

    case: str
    """Name of the case, one of `CASES`."""
    number: int
    """Number of the round within the benchmark, from 0."""
    trace: Trace
    metrics: RunMetrics
    sha256: list[tuple[str, str | None]]
    """SHA-256 of latents and of frames, for each clip; None where a clip has no frames."""


@dataclass
class Bench:
    """Benchmark: its configuration, its cases (a pipeline and baselines) and measured rounds."""

    bench_config: BenchConfig
    config: PipelineConfig
    rounds: list[Round] = field(default_factory=list)
    out_of_memory: dict[str, OutOfMemoryError] = field(default_factory=dict)
    """Out-of-memory errors of baselines that do not fit on the devices, by case."""

    def __post_init__(self) -> None:
        self.requests = _requests(self.bench_config, self.config)
        self.bench_config = self.bench_config.with_defaults_from(self.config)
        self.cases = cases_of(self.config)

    @cached_property
    def flops(self) -> PartFlops:
        """FLOPs of one clip of a benchmark, computed from the model's configs.

        The first access takes seconds; the result is cached.
        """
        return count_flops(self.config)

    def check_targets(self) -> None:
        """Raise a `RequestError` if the benchmark will not measure a metric that has a target.

        Raises:
            RequestError: A target's metric will not be measured.
        """
        dtype, user_peak = self.config.model.dtype, self.bench_config.measure.peak_tflops
        on_gpu = self.config.device != "cpu"
        names = [gpu.name for gpu in visible_gpus()] if on_gpu else [""]
        check_measurable(
            self.bench_config.targets,
            self.cases,
            on_gpu=on_gpu,
            is_peak_known=bool(user_peak) or all(peak_tflops(name, dtype) for name in names),
        )

    def rounds_of(self, case: str) -> list[Round]:
        """Return the measured rounds of one case of the benchmark.

        Args:
            case: Name of the case.
        """
        return [done for done in self.rounds if done.case == case]

    def run(
        self,
        log: Callable[[str], None],
        keep: Callable[[Round], None],
        open_observer: OpenObserver = no_observer,
    ) -> None:
        """Measure the pipeline and each of its baselines once in each round of the benchmark.

        If a baseline runs out of memory, the error is recorded in `out_of_memory`, and the
        benchmark goes on without the baseline. Every other error ends the benchmark. If a launcher
        (torchrun or Slurm) started the ranks, a lack of memory in the data-parallel baseline also
        ends the benchmark, because svdpp cannot restart these ranks.

        Args:
            log: Function that gets a line for each measured case.
            keep: Function that gets each measured round.
            open_observer: Function that opens the progress display.
        """
        repeats = self.bench_config.measure.repeats
        self.flops  # noqa: B018  counted first: an error here after measurements would waste them
        for number, case in turns(self.cases, repeats):
            if case in self.out_of_memory:
                continue
            title = f"round {number + 1} of {repeats}, {case}"
            try:
                done = self._measure(case, number, title, open_observer)
            except OutOfMemoryError as error:
                if case == PIPELINE or (case != ONE_DEVICE and find_world() is not None):
                    raise
                self.out_of_memory[case] = error
                log(f"{title}: {error.message}")
                continue
            self.rounds.append(done)
            keep(done)
            makespan, first = done.metrics.makespan, done.metrics.first_clip
            log(f"{title}: makespan {makespan:.2f} s, first clip after {first:.2f} s")

    def profile(self, path: Path) -> None:
        """Profile one clip on rank 0 by torch.profiler, in a separate run.

        Args:
            path: Path of the trace.
        """
        # The second clip is profiled, because caches are cold for the first one.
        with Pipeline(self.config, profile_path=str(path.absolute())) as pipeline:
            pipeline.run(self.requests[:2])

    def _measure(self, case: str, number: int, title: str, open_observer: OpenObserver) -> Round:
        # Under a launcher, rank 0 computes in this process in all measurements. Without the reset,
        # its peak memory would include the peak of earlier measurements.
        reset_peak()
        config = self.cases[case]
        # Clips alternate between the replicas, and within a replica between its decoders. So
        # `num_routes` successive clips take each route through the ranks once.
        parallel = config.parallel
        num_routes = parallel.data_parallel_size * parallel.num_decoders
        num_warmups = self.bench_config.measure.warmups * num_routes
        warmups = [self.requests[i % len(self.requests)] for i in range(num_warmups)]
        clips = [*warmups, *self.requests]
        trace = Trace(config.world_size, first_clip=num_warmups)
        schedule = config.layout.schedule(len(clips))
        with open_observer(title, schedule) as progress:
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
        metrics = collect_run_metrics(trace, config, config.layout.schedule(len(self.requests)))
        assert metrics is not None, "a round has a clip"
        return Round(
            case=case,
            number=number,
            trace=trace,
            metrics=metrics,
            sha256=[(clip["latents_sha256"], clip["frames_sha256"]) for clip in made],
        )


def turns(cases: Iterable[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Yield the (round, case) pairs of a benchmark in the order in which they are measured.

    The first case changes from round to round (A B C, then B C A), so that no case is always
    measured first.

    Args:
        cases: Names of the cases.
        repeats: Number of rounds.
    """
    names = list(cases)
    for number, position in product(range(repeats), range(len(names))):
        yield number, names[(number + position) % len(names)]


def launched_pipelines(bench_config: BenchConfig, config: PipelineConfig) -> Iterator[Pipeline]:
    """Yield, in order, the pipelines that a rank other than rank 0 joins under a launcher.

    Between two pipelines, rank 0 may measure diffusers, and the other ranks wait up to a week. If
    rank 0 ends, the launcher ends the other ranks.

    Args:
        bench_config: Configuration of the benchmark.
        config: Configuration of the benchmark's pipeline, the same on all ranks.
    """
    cases = cases_of(config)
    configs = [
        cases[case] for _, case in turns(cases, bench_config.measure.repeats) if case != ONE_DEVICE
    ]
    configs += [config] if bench_config.profile else []
    for each in configs:
        reset_peak()
        yield Pipeline(replace(each, start_timeout_seconds=_BETWEEN_PIPELINES_SECONDS))


def cases_of(config: PipelineConfig) -> dict[str, PipelineConfig]:
    """Return the pipeline and its baselines by name, with their configurations.

    Args:
        config: Configuration of the pipeline. If the pipeline itself is data parallel, the data
            parallel baseline is left out.
    """
    cases = {PIPELINE: config}
    if config.layout.replica_size > 1:
        cases[DATA_PARALLEL] = config.data_parallel()
    return {**cases, ONE_DEVICE: config.single_rank()}


def _requests(bench_config: BenchConfig, config: PipelineConfig) -> list[ClipRequest]:
    """Return a benchmark's clip requests: all inputs with the first seed, then the second, etc."""
    is_dummy = config.model.is_dummy
    inputs = [ClipInput()] if is_dummy else _inputs(bench_config.workload, config)
    return round_robin(inputs, bench_config.measure.seeds, bench_config.workload.clips)


def _inputs(workload: Workload, config: PipelineConfig) -> list[ClipInput]:
    """Return a benchmark's clip inputs: each image (None for clips from text) with each prompt."""
    sampling = config.sampling
    images: Sequence[MediaFile | None] = [None]
    if not isinstance(sampling, PromptedSampling) or sampling.from_image:
        given = workload.images or [str(path) for path in example_images()]
        images = check_inputs(given, sampling.video_frames)
    takes_prompts = isinstance(sampling, PromptedSampling)
    example = example_prompt(config.model.name) if takes_prompts else None
    prompts: Sequence[str | None] = workload.prompts or [example]
    still = check_inputs([str(example_images()[0])])[0]
    videos = tuple((name, still) for name in sampling.videos)
    last_image = still if sampling.has_last_image else None
    return [
        ClipInput(image, prompt, workload.negative_prompt, videos, last_image)
        for image in images
        for prompt in prompts
    ]


def differing(rounds: Sequence[Round]) -> list[str]:
    """Return the clips whose bits differ from diffusers', such as `pipeline, round 1, clip 0`.

    Args:
        rounds: Rounds of all cases, at least one. Without a round of diffusers, all rounds are
            compared with the first one.
    """
    first = next((done for done in rounds if done.case == ONE_DEVICE), rounds[0])
    return [
        f"{done.case}, round {done.number + 1}, clip {clip}"
        for done in rounds
        for clip, hashes in enumerate(done.sha256)
        if hashes != first.sha256[clip]
    ]
