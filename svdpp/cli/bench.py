"""`svdpp bench`: measures a configuration and its baselines, or compares two results."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.cli import bench_fields
from svdpp.cli.bench_fields import BenchOptions
from svdpp.cli.command import command
from svdpp.cli.console import Console, counted
from svdpp.cli.options.talk import TalkOptions
from svdpp.cli.trace_outputs import TraceOptions
from svdpp.config import DEMO_MODEL, DUMMY_MODEL
from svdpp.errors import RequestError, TargetError, VerificationError
from svdpp.launch.world import World

if TYPE_CHECKING:
    from svdpp.bench.config import BenchConfig
    from svdpp.bench.runner import Bench


@command(
    examples=(
        "svdpp bench smoke",
        "svdpp bench --compare results/smoke/A results/smoke/B",
        "svdpp bench smoke --measure.repeats=7 --baseline results/smoke/A",
    ),
    without=("timeline", "profile"),
    # Options of the form --section.field=value are the configuration's, not this command's.
    settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(
    console: Console,
    launched: World | None,
    asked: BenchOptions,
    traces: TraceOptions,
    talk: TalkOptions,  # noqa: ARG001  read where every command is called
) -> None:
    """Measure a pipeline against data parallel and against diffusers on one device.

    Each round starts, warms up and measures all three on the same devices. If a clip's bits differ
    from those of diffusers, the results are written and the exit code is 3. It is 10 if a target
    is missed by more than noise.
    """
    if launched is not None:
        raise RequestError(
            "svdpp bench starts its own ranks", "start it on one host, without torchrun or srun"
        )
    names, overrides = _sorted_out(asked.words or [])
    if asked.compare is not None:
        if names or overrides or asked.settings or asked.baseline is not None:
            raise RequestError("--compare takes two folders and no configuration")
        _compare(console, *asked.compare)
        return
    overrides = [*(asked.settings or []), *overrides]
    if asked.torch_profile:
        overrides.append("profile=true")
    point = _configuration(names, overrides)
    from svdpp.launch import fork_server

    traces.check()
    with bench_fields.named():
        family = bench_fields.family(point)
    fork_server.start_early(family=family, device=point.pipeline.device)
    one = _bench(point)
    if asked.baseline is not None:
        from svdpp.bench.compare import check_baseline

        check_baseline(asked.baseline, one.asked.model_dump(mode="json"), one.asked.measure.repeats)
    found = _run(console, one, asked, traces.trace)
    if console.as_json:
        console.json([found])
    _check(one, found)


def _compare(console: Console, a: Path, b: Path) -> None:
    from svdpp.bench.compare import compare
    from svdpp.cli.bench_report import show_comparison

    found = compare(a, b)
    if console.as_json:
        console.json(found.to_json())
    else:
        show_comparison(console, a, b, found)


def _sorted_out(words: list[str]) -> tuple[list[str], list[str]]:
    names, overrides = [], []
    for word in words:
        if not word.startswith("-"):
            names.append(word)
        elif word.startswith("--") and "=" in word:
            overrides.append(word.removeprefix("--"))
        else:
            raise RequestError(
                f"no such option: {word}", "--section.field=value or --set sets a field"
            )
    return names, overrides


def _configuration(names: list[str], overrides: list[str]) -> BenchConfig:
    from svdpp.bench.config import read_config, shipped

    if len(names) != 1:
        given = f"got {len(names)}: {' '.join(names)}" if names else "got none"
        raise RequestError(
            f"bench takes one configuration, {given}", f"try: svdpp bench {shipped()[0]}"
        )
    return read_config(names[0], overrides)


def _bench(point: BenchConfig) -> Bench:
    from svdpp.bench.runner import Bench
    from svdpp.driver.pipeline import Pipeline

    with bench_fields.named():
        pipeline = Pipeline(bench_fields.pipeline_config(point))
        one = Bench(point, pipeline.config)
        if pipeline.checkpoint is not None:
            pipeline.checkpoint.check_requests(one.config.sampling, one.requests)
    return one


def _run(console: Console, one: Bench, asked: BenchOptions, trace: Path | None) -> dict[str, Any]:
    from svdpp.bench.compare import COSTS, PROFILE, compare
    from svdpp.bench.results import Results
    from svdpp.cli.bench_report import show_comparison, show_summary
    from svdpp.cli.progress import Progress

    kept = Results(asked.results, one)
    one.profile_path = (kept.folder / PROFILE).absolute()
    one.trace_path = trace
    one.open_observer = partial(Progress, console, costs=one.config.costs, ranks=False)
    console.info(_headline(one))
    with bench_fields.named():
        one.run(console.info, kept.add)
    found = kept.finish()
    show_summary(console, found)
    if asked.baseline is not None:
        comparison = compare(asked.baseline, kept.folder)
        found["baseline"] = comparison.to_json()
        console.result()
        show_comparison(console, asked.baseline, kept.folder, comparison)
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
    if config.device == "cpu" and config.model.dtype != "fp32":
        said += f"; {config.model.dtype} on a CPU says nothing of a GPU"
    return said


def _check(one: Bench, found: dict[str, Any]) -> None:
    """Raises what is wrong with a bench that was measured: bits that differ, else figures."""
    from svdpp.bench.runner import differing
    from svdpp.bench.targets import missed

    if different := differing(one.rounds):
        count = counted(len(different), "clip")
        raise VerificationError(
            f"bits differ from those of diffusers in {count}, first in {different[0]}",
            "svdpp verify shows the first step that differs",
        )
    targets, slower = missed(found.get("targets", {})), found.get("baseline", {}).get("slower", [])
    said = [f"missed {counted(len(targets), 'target')}: {', '.join(targets)}"] if targets else []
    if slower:
        said.append(f"slower than the baseline by more than noise: {', '.join(slower)}")
    if said:
        raise TargetError("; ".join(said), "the tables above show each figure and its range")
