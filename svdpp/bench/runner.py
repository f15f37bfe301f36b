"""A bench: the pipeline and its baselines measured in turns, and the folder of the results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from svdpp.bench.compare import (
    CONFIG,
    COSTS,
    DATA_PARALLEL,
    ENVIRONMENT,
    FIGURES,
    ONE_DEVICE,
    PIPELINE,
    ROUNDS,
    SUMMARY,
    TIME_PARTS,
    check_measurable,
    is_share,
    outcome,
)
from svdpp.bench.config import BenchConfig, Workload
from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics.cost_profile import median_costs
from svdpp.diagnostics.environment import environment
from svdpp.diagnostics.figures import RunFigures, measured_figures, rounded
from svdpp.diagnostics.report import diagnose
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import Observer, OpenObserver, no_observer
from svdpp.driver.trace import Trace
from svdpp.errors import OutOfMemoryError
from svdpp.media import output_files
from svdpp.media.inputs import (
    EXAMPLE_PROMPT,
    ClipInput,
    Photo,
    check_inputs,
    example_photos,
    in_turn,
)
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import percentile
from svdpp.verification.verify import run_reference

SCHEMA_VERSION = 4


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

    def run(
        self,
        log: Callable[[str], None],
        keep: Callable[[Round], None],
        open_observer: OpenObserver = no_observer,
    ) -> None:
        """Measures every case once in each round.

        A baseline's lack of memory is a result; every other error ends the bench. `keep` takes
        every measured round of a case, for which `open_observer` opens an observer.
        """
        for number, case in self.turns():
            title = f"round {number + 1} of {self.asked.measure.repeats}, {case}"
            try:
                done = self._measure(case, number, title, open_observer)
            except OutOfMemoryError as error:
                if case == PIPELINE:
                    raise
                self.out_of_memory[case] = error
                log(f"{title}: {error.message}")
                continue
            self.rounds.append(done)
            keep(done)
            makespan, first = done.figures.makespan, done.figures.first_clip
            log(f"{title}: makespan {makespan:.2f} s, first clip after {first:.2f} s")

    def profile(self, path: Path) -> None:
        """Makes a clip in a run of its own, of which torch.profiler writes a trace."""
        with Pipeline(self.config, profile_path=str(path.absolute())) as pipeline:
            pipeline.run(self.requests[:2])

    def _measure(self, case: str, number: int, title: str, open_observer: OpenObserver) -> Round:
        config = self.cases[case]
        # This many clips reach every rank: all replicas, and all decoders of each.
        num_routes = 1 if case == ONE_DEVICE else config.replicas * config.decoders
        num_warmups = self.asked.measure.warmups * num_routes
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
        cases[DATA_PARALLEL] = config.data_parallel()
    return {**cases, ONE_DEVICE: config.alone()}


def _requests(asked: BenchConfig, config: PipelineConfig) -> list[ClipRequest]:
    """All inputs with the first seed, then all with the second, and so on."""
    seeds, count = asked.measure.seeds, asked.workload.clips
    if config.model.is_dummy:
        return in_turn([ClipInput()], seeds, count)
    return in_turn(_inputs(asked.workload, config.sampling), seeds, count)


def _inputs(workload: Workload, sampling: SamplingConfig) -> list[ClipInput]:
    """Each image with each prompt; an image is None if clips start from text."""
    images: Sequence[Photo | None] = [None]
    if not isinstance(sampling, PromptedSampling) or sampling.from_image:
        given = workload.images or [str(path) for path in example_photos()]
        images = check_inputs(given, sampling.video_frames)
    example = EXAMPLE_PROMPT if isinstance(sampling, PromptedSampling) else None
    prompts: Sequence[str | None] = workload.prompts or [example]
    still = check_inputs([str(example_photos()[0])])[0]
    videos = tuple((name, still) for name in sampling.videos)
    return [
        ClipInput(image, prompt, workload.negative_prompt, videos)
        for image in images
        for prompt in prompts
    ]


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


# --- the results --------------------------------------------------------------------------------


class Results:
    """The folder of one run: configuration and environment, then rounds, then the summary."""

    def __init__(self, root: Path, bench: Bench) -> None:
        self._bench = bench
        output_files.check_writable(root.absolute())
        sha256 = bench.asked.sha256
        self.run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{sha256[:8]}"
        self.folder = root / bench.asked.experiment / self.run_id
        with output_files.disk_errors(f"{str(self.folder)!r} cannot be created"):
            self.folder.mkdir(parents=True)
        text = f"# sha256 {sha256}\n{bench.asked.to_yaml()}"
        output_files.write_text(self.folder / CONFIG, text)
        output_files.write_json(self.folder / ENVIRONMENT, environment())

    def add(self, done: Round) -> None:
        """Appends a round's figures, which stay if the bench fails later."""
        measured = done.figures.to_json()
        record = {"case": done.case, "round": done.number, "measured": measured}
        with (
            output_files.disk_errors(f"{ROUNDS} cannot be written"),
            (self.folder / ROUNDS).open("a", encoding="ascii") as file,
        ):
            file.write(json.dumps(record) + "\n")

    def finish(self) -> dict[str, Any]:
        """Writes summary and costs; returns what `summary.json` holds."""
        found = {**summary(self._bench, self.run_id), "limits": self._limits()}
        output_files.write_json(self.folder / COSTS, costs_of(self._bench, self.run_id).to_json())
        output_files.write_json(self.folder / SUMMARY, found)
        return found

    def _limits(self) -> dict[str, Any]:
        """The diagnosis of the pipeline's round with the median makespan."""
        rounds = sorted(self._bench.rounds_of(PIPELINE), key=lambda done: done.figures.makespan)
        median = rounds[(len(rounds) - 1) // 2]
        found = diagnose(median.figures, self.folder / COSTS, "--pipeline.{}={}")
        return {"round": median.number, **found.to_json()}


def summary(bench: Bench, run_id: str) -> dict[str, Any]:
    """What `summary.json` holds, without what limits the pipeline."""
    cases = {case: _case(bench, case) for case in bench.cases}
    content = {
        "schema_version": SCHEMA_VERSION,
        "experiment": bench.asked.experiment,
        "run_id": run_id,
        "config_sha256": bench.asked.sha256,
        "config": json.loads(json.dumps(bench.asked.model_dump())),
        "cases": cases,
        "speedups": _speedups(cases),
        "same_bits": not differing(bench.rounds),
        "latents_sha256": bench.rounds_of(PIPELINE)[0].latents_sha256,
    }
    targets = bench.asked.targets.items()
    return {**content, "targets": {name: outcome(name, text, content) for name, text in targets}}


def _case(bench: Bench, case: str) -> dict[str, Any]:
    config, error = bench.cases[case], bench.out_of_memory.get(case)
    rounds = [_figures(done) for done in bench.rounds_of(case)]
    return {
        "layout": "diffusers' own pipeline" if case == ONE_DEVICE else str(config.layout),
        "world": config.world_size,
        "error": None if error is None else error.message,
        "rounds": rounds,
        "over_rounds": {name: _over_rounds(name, rounds) for name in FIGURES if rounds},
    }


def _over_rounds(name: str, rounds: list[dict[str, Any]]) -> float | None:
    """One number for a figure of all rounds; None if no round has it.

    It is the geometric mean, as in `compare`, so that the ratio of two cases is the mean of the
    rounds' ratios. For shares it is the arithmetic mean, so that they still add up to 1; for memory
    it is the maximum.
    """
    values = [figures[name] for figures in rounds if figures[name] is not None]
    if not values:
        return None
    if name.startswith("peak_"):
        return float(max(values))
    if is_share(name):
        return statistics.fmean(values)
    return statistics.geometric_mean(values) if all(values) else 0.0


def _figures(done: Round) -> dict[str, Any]:
    """A round's figures, as plain numbers; those of each rank are in `rounds.jsonl`."""
    figures, forecast = done.figures, done.figures.forecast_seconds
    steps, ranks = [step.end - step.start for step in done.trace.steps], done.figures.ranks
    wall = sum(rank.wall for rank in ranks)
    values = {
        "clips": figures.clips,
        "makespan_seconds": figures.makespan,
        "overhead": figures.makespan / forecast if forecast else None,
        "first_clip_seconds": figures.first_clip,
        "steady_clips_per_minute": 60 / figures.seconds_per_clip,
        **{f"step_p{n}_seconds": percentile(steps, n) for n in (50, 90, 95)},
        "bubble": figures.bubble,
        **{f"{part}_share": sum(getattr(r, part) for r in ranks) / wall for part in TIME_PARTS},
        "start_seconds": figures.start_seconds,
        "load_seconds": max(rank.load_seconds for rank in ranks),
        "peak_allocated_gib": max(rank.allocated_bytes or 0 for rank in ranks) / 2**30 or None,
        "peak_reserved_gib": max(rank.peak_bytes or 0 for rank in ranks) / 2**30 or None,
    }
    return {"round": done.number, **rounded(values)}


def _speedups(cases: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline's clips per minute over those of each other case in the same round."""
    rate = "steady_clips_per_minute"
    ours = {figures["round"]: figures[rate] for figures in cases[PIPELINE]["rounds"]}
    result = {}
    for case, about in cases.items():
        rounds = about["rounds"]
        ratios = [round(ours[figures["round"]] / figures[rate], 4) for figures in rounds]
        if case != PIPELINE and ratios:
            result[case] = {"rounds": ratios, "over_rounds": statistics.geometric_mean(ratios)}
    return result


def costs_of(bench: Bench, run_id: str) -> Costs:
    """The medians of all rounds of the pipeline. A bench does not measure memory and writing.

    A rank that only decodes in the pipeline has its steps from data parallel.
    """
    traces = [done.trace for done in bench.rounds_of(PIPELINE)]
    elsewhere = [done.trace for done in bench.rounds_of(DATA_PARALLEL)]
    source = f"measured by: svdpp bench, {bench.asked.experiment}/{run_id}"
    return median_costs(bench.config, None, traces, elsewhere, source=source)
