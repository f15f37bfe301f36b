"""`svdpp bench`: measures a configuration and its baselines, or compares two results."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.cli.command import DIAGNOSTICS, argument, command
from svdpp.cli.console import Console, counted
from svdpp.cli.options.pipeline import PipelineOptions, PipelineRequest
from svdpp.config import DEMO_MODEL, DUMMY_MODEL, PipelineConfig
from svdpp.config.limits import require
from svdpp.errors import RequestError, TargetError, VerificationError
from svdpp.launch.world import World

if TYPE_CHECKING:
    from svdpp.bench.config import BenchConfig
    from svdpp.bench.runner import Bench


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure or compare."""

    words: list[str] | None = argument(
        "CONFIG [--SECTION.FIELD=VALUE]...",
        "A YAML file, or a configuration that comes with svdpp: smoke (CPU, a minute or two), "
        "svd-xt (all GPUs) or wan-a14b (4 GPUs).",
    )
    compare: tuple[Path, Path] | None = DIAGNOSTICS.setting(
        "A B", "Compare the results in folder B with those in folder A; measure nothing."
    )
    results: Path = DIAGNOSTICS.setting(
        "DIR", "Write results to DIR/EXPERIMENT/RUN/.", default=Path("results")
    )


@command(
    examples=(
        "svdpp bench smoke",
        "svdpp bench --compare results/smoke/A results/smoke/B",
        "svdpp bench smoke --measure.repeats=7 --pipeline.split=balanced",
    ),
    # Options of the form --section.field=value are the configuration's, not this command's.
    settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(console: Console, launched: World | None, asked: BenchOptions) -> None:
    """Measure a pipeline against data parallel and against diffusers on one device.

    Each round starts, warms up and measures all three on the same devices. If a clip's bits differ
    from those of diffusers, the results are written and the exit code is 3. It is 10 if a target
    is missed by more than noise.
    """
    alone = "start it on one host, without torchrun or srun"
    require(launched is None, "svdpp bench starts its own ranks", alone)
    names, overrides = _sorted_out(asked.words or [])
    if asked.compare is not None:
        require(not asked.words, "--compare takes two folders and no configuration")
        from svdpp.bench.compare import compare

        console.answer(compare(*asked.compare).to_json())
        return
    from svdpp.bench.config import read_config, shipped
    from svdpp.launch import fork_server

    wrong = f"bench takes one configuration, got {' '.join(names) or 'none'}"
    require(len(names) == 1, wrong, f"try: svdpp bench {shipped()[0]}")
    point = read_config(names[0], overrides)
    model = _options(point)
    family = None if model.is_dummy else model.family
    fork_server.start_early(family=family, device=point.pipeline.device)
    one = _bench(point)
    found = _run(console, one, asked.results)
    console.json([found])
    _check(one, found)


def _sorted_out(words: list[str]) -> tuple[list[str], list[str]]:
    names, overrides = [], []
    for word in words:
        if not word.startswith("-"):
            names.append(word)
        elif word.startswith("--") and "=" in word:
            overrides.append(word.removeprefix("--"))
        else:
            raise RequestError(f"no such option: {word}", "--section.field=value sets a field")
    return names, overrides


def _bench(point: BenchConfig) -> Bench:
    from svdpp.bench.runner import Bench
    from svdpp.driver.pipeline import Pipeline

    pipeline = Pipeline(pipeline_config(point))
    one = Bench(point, pipeline.config)
    if pipeline.checkpoint is not None:
        for request in one.requests:
            pipeline.checkpoint.check_request(one.config.sampling, request)
    return one


def pipeline_config(point: BenchConfig) -> PipelineConfig:
    """The configuration that `svdpp run` makes of the same options, by which errors name fields."""
    options, workload = _options(point), point.workload
    for name in ("prompts", "negative_prompt"):
        wrong = f"workload.{name} is not for {options.model}, a model of the family svd"
        is_given = getattr(workload, name) is not None
        require(not (is_given and options.family == "svd"), wrong, f"leave workload.{name} out")
    from_image = True if workload.images else None
    request = PipelineRequest(options=options, num_clips=workload.clips, from_image=from_image)
    return request.resolve()[0]


def _options(point: BenchConfig) -> PipelineOptions:
    """The options with the values of the sections, whose fields have their names or `renamed`."""
    renamed = {"name": "model", "family": "as_family", "frames": "num_frames"}
    sections = point.model.model_dump() | point.pipeline.model_dump(exclude_defaults=True)
    values = {renamed.get(name, name): value for name, value in sections.items()}
    values |= {"device": point.pipeline.device, "dtype": point.precision}
    values |= {"latent_shape": tuple(point.model.latent_shape)}
    values |= {"cfg_parallel": str(point.pipeline.cfg_parallel)}
    others = {"clips", "images", "prompts", "negative_prompt"}
    sampling = {
        renamed.get(name, name): value
        for name, value in point.workload.model_dump(exclude=others).items()
        if value is not None
    }
    own = sampling.keys() - {field.name for field in fields(PipelineOptions)}
    values |= {name: sampling[name] for name in sampling.keys() - own}
    return PipelineOptions(**values, param=[f"{name}={sampling[name]}" for name in sorted(own)])


def _run(console: Console, one: Bench, results: Path) -> dict[str, Any]:
    from svdpp.bench.compare import COSTS, PROFILE
    from svdpp.bench.runner import Results
    from svdpp.cli.progress import Progress

    kept = Results(results, one)
    console.info(_headline(one))
    progress = partial(Progress, console, costs=one.config.costs, ranks=False)
    one.run(console.info, kept.add, progress)
    if one.asked.profile:
        console.info("one clip under torch.profiler, in a separate run")
        one.profile(kept.folder / PROFILE)
    found = kept.finish()
    show_summary(console, found)
    console.result(f"results: {kept.folder}")
    folder, costs = (shlex.quote(str(each)) for each in (kept.folder, kept.folder / COSTS))
    world = one.config.world_size
    console.info(f"to compare it with another: svdpp bench --compare OTHER {folder}")
    console.info(f"plan with it: svdpp plan --world {world} --costs {costs} --compare")
    return {**found, "folder": str(kept.folder)}


def _headline(one: Bench) -> str:
    config, asked = one.config, one.asked
    said = (
        f"{asked.experiment}: {counted(asked.workload.clips, 'clip')} of "
        f"{counted(config.sampling.num_inference_steps, 'step')}, "
        f"{config.model.name} {config.model.dtype}, "
        f"{counted(config.world_size, f'{config.device} rank')} ({config.layout}), "
        f"{counted(asked.measure.repeats, 'round')}"
    )
    if config.model.name in (DEMO_MODEL, DUMMY_MODEL):
        said += "; this is not Stable Video Diffusion, and its figures say nothing of SVD"
    return said


def _check(one: Bench, found: dict[str, Any]) -> None:
    """Raises what is wrong with a bench that was measured: bits that differ, else figures."""
    from svdpp.bench.compare import missed
    from svdpp.bench.runner import differing

    if different := differing(one.rounds):
        count = counted(len(different), "clip")
        raise VerificationError(
            f"bits differ from those of diffusers in {count}, first in {different[0]}",
            "svdpp verify shows the first step that differs",
        )
    if targets := missed(found["targets"]):
        raise TargetError(
            f"missed {counted(len(targets), 'target')}: {', '.join(targets)}",
            "the table above shows each figure and its range",
        )


def show_summary(console: Console, found: dict[str, Any]) -> None:
    """Prints each figure in every case, the speed-ups, what limits it, and whether bits agree."""
    cases, limits = found["cases"], found["limits"]
    console.result("figures: geometric means over rounds; of shares the mean, of GiB the largest")
    shown = {
        "figure": {
            name: {case: cases[case]["over_rounds"].get(name) for case in cases}
            for name in cases["pipeline"]["over_rounds"]
        },
        "not measured": [about["error"] for about in cases.values() if about["error"]],
        "clips a minute, over": found["speedups"],
        "limits": limits["headline"],
        "try": limits["advice"] and limits["advice"]["options"],
        "same_bits": found["same_bits"],
        "target": found["targets"],
    }
    console.show({name: value for name, value in shown.items() if value or value is False})
