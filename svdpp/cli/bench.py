"""`svdpp bench`: measures a configuration and its baselines, or compares two results."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.cli import bench_fields
from svdpp.cli.command import command
from svdpp.cli.console import Console, counted
from svdpp.cli.options.declare import DIAGNOSTICS, argument, setting
from svdpp.cli.trace_outputs import check_target
from svdpp.config import DEMO_MODEL, DUMMY_MODEL
from svdpp.errors import RequestError, TargetError, VerificationError
from svdpp.launch.world import World

if TYPE_CHECKING:
    from svdpp.bench.compare import Comparison, Ratio
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
    compare: tuple[Path, Path] | None = setting(
        DIAGNOSTICS,
        "A B",
        "Compare the results in folder B with those in folder A; measure nothing.",
    )
    baseline: Path | None = setting(
        DIAGNOSTICS,
        "DIR",
        "After measuring, compare with the earlier results in DIR. The exit code is 10 if svdpp "
        "became slower by more than noise.",
    )
    results: Path = setting(
        DIAGNOSTICS, "DIR", "Write results to DIR/EXPERIMENT/RUN/.", default=Path("results")
    )
    trace: Path | None = setting(
        DIAGNOSTICS, "FILE.json", "Write a trace of the pipeline's last round, as svdpp run does."
    )


@command(
    examples=(
        "svdpp bench smoke",
        "svdpp bench --compare results/smoke/A results/smoke/B",
        "svdpp bench smoke --measure.repeats=7 --baseline results/smoke/A",
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
    if launched is not None:
        raise RequestError(
            "svdpp bench starts its own ranks", "start it on one host, without torchrun or srun"
        )
    names, overrides = _sorted_out(asked.words or [])
    if asked.compare is not None:
        if names or overrides or asked.baseline is not None:
            raise RequestError("--compare takes two folders and no configuration")
        _compare(console, *asked.compare)
        return
    point = _configuration(names, overrides)
    from svdpp.launch import fork_server

    check_target("--trace", asked.trace, ".json")
    with bench_fields.named():
        family = bench_fields.family(point)
    fork_server.start_early(family=family, device=point.pipeline.device)
    one = _bench(point)
    if asked.baseline is not None:
        from svdpp.bench.compare import check_baseline

        check_baseline(asked.baseline, one.asked.model_dump(mode="json"), one.asked.measure.repeats)
    found = _run(console, one, asked)
    if console.as_json:
        console.json([found])
    _check(one, found)


def _compare(console: Console, a: Path, b: Path) -> None:
    from svdpp.bench.compare import compare

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
            raise RequestError(f"no such option: {word}", "--section.field=value sets a field")
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


def _run(console: Console, one: Bench, asked: BenchOptions) -> dict[str, Any]:
    from svdpp.bench.compare import COSTS, PROFILE, compare
    from svdpp.bench.results import Results
    from svdpp.cli.progress import Progress

    kept = Results(asked.results, one)
    one.profile_path = (kept.folder / PROFILE).absolute()
    one.trace_path = asked.trace
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


def show_summary(console: Console, found: dict[str, Any]) -> None:
    """Prints a row for each case, the speed-ups, the shares of time, and whether bits agree."""
    console.result("figures: geometric means over rounds; of shares the mean, of GiB the largest")
    console.table([_row(case, about) for case, about in found["cases"].items()])
    for case, about in found["cases"].items():
        if about["error"]:
            console.result(f"{case}: {about['error']}")
    for case, speedup in found["speedups"].items():
        ratios = speedup["rounds"]
        console.result(
            f"pipeline over {case}: {speedup['over_rounds']:.3f} times the clips a minute "
            f"(rounds: {min(ratios):.3f} to {max(ratios):.3f})"
        )
    console.result(_accounted(found))
    console.result(f"what limits the pipeline: {found['limits']['headline']}")
    if found["limits"]["advice"]:
        console.result(f"  {found['limits']['advice']['command']}")
    bits = "the same bits in every case" if found["same_bits"] else "DIFFERENT BITS between cases"
    console.result(f"latents and frames: {bits}")
    if found.get("targets"):
        console.table(
            [
                {
                    "target": name,
                    "bound": outcome["target"],
                    "value": "-" if outcome["value"] is None else f"{outcome['value']:.3g}",
                    "within": within(outcome["low"], outcome["high"]),
                    "": outcome["verdict"],
                }
                for name, outcome in found["targets"].items()
            ]
        )


def within(low: float | None, high: float | None) -> str:
    """A range; a dash if it is unknown."""
    return "-" if low is None or high is None else f"{low:.2g} to {high:.2g}"


def _row(case: str, about: dict[str, Any]) -> dict[str, str]:
    columns = ("clips/min", "rounds", "first s", "step ms", "bubble", "start s", "GiB")
    if not about["rounds"]:
        return {"case": case, **dict.fromkeys(columns, "-")}
    figures = about["over_rounds"]
    rates = [each["steady_clips_per_minute"] for each in about["rounds"]]
    cells = (
        f"{figures['steady_clips_per_minute']:.3g}",
        f"{min(rates):.3g}-{max(rates):.3g}",
        f"{figures['first_clip_seconds']:.2f}",
        f"{figures['step_p50_seconds'] * 1000:.1f}",
        f"{figures['bubble']:.0%}",
        f"{figures['start_seconds']:.1f}",
        f"{figures['peak_allocated_gib'] or figures['peak_reserved_gib']:.2f}",
    )
    return {"case": case, **dict(zip(columns, cells, strict=True))}


def _accounted(found: dict[str, Any]) -> str:
    """The shares of the pipeline's time, including what is unaccounted for."""
    figures = found["cases"]["pipeline"]["over_rounds"]
    parts = ", ".join(
        f"{name} {figures[f'{name}_share']:.1%}"
        for name in ("compute", "wait", "transfer", "idle", "unaccounted")
    )
    return f"time of the pipeline's ranks: {parts}"


def show_comparison(console: Console, a: Path, b: Path, found: Comparison) -> None:
    """Prints differences of settings and machine, every ratio, and the verdict."""
    console.result(f"A {a}")
    console.result(f"B {b}")
    for what, lines in (("setting", found.settings), ("machine", found.machines)):
        for line in lines:
            console.result(f"{what} differs: {line}")
    console.result()
    console.result("A, B: geometric means over rounds")
    console.table([*map(_ratio_row, found.ratios)])
    console.result()
    if found.same_bits is not None:
        console.result(f"latents: {'the same bits' if found.same_bits else 'DIFFERENT BITS'}")
    console.result(found.verdict)


def _ratio_row(ratio: Ratio) -> dict[str, str]:
    words = {True: "noise", False: "differs", None: "one round"}
    return {
        "figure": ratio.name,
        "A": f"{ratio.a:.4g}",
        "B": f"{ratio.b:.4g}",
        "B / A": f"{ratio.value:.3g}",
        "within": within(ratio.low, ratio.high),
        "": "drift" if ratio.is_baseline else words[ratio.is_noise],
    }
