"""`svdpp bench`: measures a configuration and its baselines, or compares two benchmarks."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.option_names import OPTION_OF_FIELD
from svdpp.cli.options import complete
from svdpp.cli.options.declare import DIAGNOSTICS, argument, path_option
from svdpp.cli.options.pipeline import PeakTflops
from svdpp.config import DEMO_MODELS, DUMMY_MODEL
from svdpp.config.limits import require
from svdpp.errors import RequestError, VerificationError, pluralize
from svdpp.launch.world import World, is_secondary_rank

if TYPE_CHECKING:
    from svdpp.bench.runner import Bench


app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `svdpp bench`, which runs one benchmark or compares two finished ones."""

    words: Annotated[
        list[str] | None,
        argument(
            "CONFIG [--SECTION.FIELD=VALUE]",
            "A YAML file, or a configuration that comes with svdpp: smoke (CPU, a minute or two), "
            "svd-xt (all GPUs) or wan-a14b (4 GPUs).",
            autocompletion=complete.configurations,
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        path_option(
            panel=DIAGNOSTICS,
            metavar="A B",
            help="Compare the results in folder B with those in folder A; measure nothing.",
        ),
    ] = None
    results: Annotated[
        Path,
        path_option(panel=DIAGNOSTICS, metavar="DIR", help="Write results to DIR/EXPERIMENT/RUN/."),
    ] = Path("results")
    peak_tflops: PeakTflops = None


@app.command(
    **command_settings(
        "svdpp bench smoke",
        "svdpp bench --compare results/smoke/A results/smoke/B",
        "svdpp bench smoke --measure.repeats=7 --pipeline.split=balanced",
        # Options of the form --section.field=value override fields of the benchmark's
        # configuration.
        allow_extra_args=True,
        ignore_unknown_options=True,
    )
)
@with_option_groups
def bench(console: Console, launched: World | None, options: BenchOptions) -> None:
    """Measure a pipeline against data parallel and against diffusers on one device.

    In each round, the pipeline, data parallel and diffusers are started, warmed up and measured one
    after another, on the same devices. The exit code is 3 if a clip's bits differ from those of
    diffusers, and 10 if a target of the configuration is missed; the results are written in both
    cases. Under torchrun or srun, the launched ranks are measured. Only rank 0 measures diffusers
    and writes the results.

    Raises:
        VerificationError: The bits of a clip differ from those of diffusers.
        RequestError: No configuration or more than one is named, or the fields of the configuration
            contradict each other.
    """
    names, overrides = _split_words(options.words or [])
    if options.compare is not None:
        require(not options.words, "--compare takes two folders and no configuration")
        _compare(console, *options.compare)
        return
    from svdpp.bench.config import pipeline_config, read_config, shipped
    from svdpp.bench.runner import Bench, differing, launched_pipelines
    from svdpp.bench.targets import Outcome, check_met
    from svdpp.driver.pipeline import Pipeline

    console.rename_fields(_names_in_configuration())
    wrong = f"bench takes one configuration, got {' '.join(names) or 'none'}"
    require(len(names) == 1, wrong, f"try: svdpp bench {shipped()[0]}", configurations=names)
    if options.peak_tflops is not None:
        overrides.append(f"measure.peak_tflops={options.peak_tflops}")
    point = read_config(names[0], overrides)
    config = pipeline_config(point, launched)
    if is_secondary_rank(launched):
        from svdpp.cli.progress import serve_member

        for pipeline in launched_pipelines(point, config):
            serve_member(pipeline, launched, console)
        return
    pipeline = Pipeline(config)
    one = Bench(point, pipeline.config)
    one.check_targets()
    if pipeline.checkpoint is not None:
        for request in one.requests:
            pipeline.checkpoint.check_request(one.config.sampling, request)
    summary = _run(console, one, options.results)
    console.json([summary])
    if different := differing(one.rounds):
        count = pluralize(len(different), "clip")
        raise VerificationError(
            f"bits differ from those of diffusers in {count}, first in {different[0]}",
            "svdpp verify shows the first step that differs",
            details={"different_clips": len(different), "first": different[0]},
        )
    check_met([Outcome(**each) for each in summary["targets"]])


def _compare(console: Console, a: Path, b: Path) -> None:
    from svdpp.bench.compare import compare

    found = compare(a, b)
    console.json(found.to_json())
    words = {True: "noise", False: "differs", None: "one round"}
    rows = [
        {
            **{"metric": one.name, "A": one.a, "B": one.b, "B / A": one.value},
            "range": None
            if one.low is None or one.high is None
            else format_range(one.low, one.high),
            "verdict": "drift" if one.must_be_equal else words[one.is_noise],
        }
        for one in found.ratios
    ]
    console.result("geometric means over rounds")
    console.show(
        {
            **{"A": str(a), "B": str(b)},
            "settings": "; ".join(found.settings) or "the same",
            "machines": "; ".join(found.machines) or "the same",
            "ratios": rows,
            "latents have the same bits": found.same_bits,
            "verdict": found.verdict,
        }
    )


def format_range(low: float, high: float) -> str:
    """Return a range of ratios as text, such as `0.97..1.05`: short enough for 80 columns.

    Args:
        low: Lower end, above 0.
        high: Upper end.
    """
    bounds = (f"{bound:.3g}" if 0.01 <= bound < 100 else f"{bound:.0e}" for bound in (low, high))
    return "..".join(bounds)


def _split_words(words: list[str]) -> tuple[list[str], list[str]]:
    names, overrides = [], []
    for word in words:
        if not word.startswith("-"):
            names.append(word)
        elif word.startswith("--") and "=" in word:
            overrides.append(word.removeprefix("--"))
        else:
            raise RequestError(
                f"no such option: {word}",
                "use --SECTION.FIELD=VALUE to set a field of the configuration",
            )
    return names, overrides


def _names_in_configuration() -> dict[str, str]:
    """Map each field that errors name to its option in `bench`, such as `--workload.frames`."""
    from svdpp.bench.config import Model, Ranks, Section, Workload

    sections: dict[str, type[Section]] = {"model": Model, "pipeline": Ranks, "workload": Workload}
    names = {
        field: f"--{section}.{field}"
        for section, model in sections.items()
        for field in model.model_fields
    }
    own_names = {option.replace("-", "_"): field for field, option in OPTION_OF_FIELD.items()}
    own_names |= {"world": "world_size", "name": "model"}
    return {
        **{own_names.get(field, field): name for field, name in names.items()},
        "dtype": "--precision",
        "debug": "--debug",
    }


def _run(console: Console, one: Bench, results: Path) -> dict[str, Any]:
    from svdpp.bench.results import COSTS, PROFILE, Results
    from svdpp.cli.progress import Progress

    kept = Results(results, one)
    model, clips = one.config.model, pluralize(one.bench_config.workload.clips, "clip")
    rounds = pluralize(one.bench_config.measure.repeats, "round")
    console.info(f"{rounds} of {clips}, {model.name} {model.dtype}, {one.config.layout}")
    if model.name in (*DEMO_MODELS, DUMMY_MODEL):
        console.info("this model is a toy, and its figures say nothing about real models")
    progress = partial(Progress, console, costs=one.config.costs, ranks=False)
    one.run(console.info, kept.add, progress)
    if one.bench_config.profile:
        console.info("one clip under torch.profiler, in a separate run")
        one.profile(kept.folder / PROFILE)
    summary = kept.finish()
    show_summary(console, summary)
    console.result(f"results: {kept.folder}")
    folder, costs = (shlex.quote(str(each)) for each in (kept.folder, kept.folder / COSTS))
    world = one.config.world_size
    console.info(f"to compare this benchmark with another: svdpp bench --compare OTHER {folder}")
    console.info(f"plan with these costs: svdpp plan --world {world} --costs {costs} --compare")
    return {**summary, "folder": str(kept.folder)}


def show_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print a benchmark's metrics and speed-ups, what limits its speed, and whether bits match.

    The bits are those of the clips. They are compared with the clips of diffusers.

    Args:
        console: Console of the command.
        summary: Content of `summary.json`.
    """
    cases, limits = summary["cases"], summary["limits"]
    console.result(
        "metrics: geometric means over rounds; shares: arithmetic means; GiB: the largest value"
    )
    shown = {
        "metric": {
            name: {case: cases[case]["over_rounds"].get(name) for case in cases}
            for name in cases["pipeline"]["over_rounds"]
        },
        "not measured": [about["error"] for about in cases.values() if about["error"]],
        "clips a minute, over": summary["speedups"],
        "limits": limits["headline"],
        "try": limits["advice"] and limits["advice"]["options"],
        "same_bits": summary["same_bits"],
        "targets": [{**each, "met": "yes" if each["met"] else "no"} for each in summary["targets"]],
    }
    console.show({name: value for name, value in shown.items() if value or value is False})
