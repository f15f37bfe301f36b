"""Owns the options of `svdpp bench`: a configuration to measure, or two results to compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli.options.declare import DIAGNOSTICS, LAYOUT, flag, option


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure or compare."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG [--SECTION.FIELD=VALUE]...",
            help="A YAML file, or a configuration that comes with svdpp: smoke (CPU, a minute or "
            "two), svd-xt (all GPUs) or wan-a14b (4 GPUs). If a field has a list, each of its "
            "values is measured.",
            show_default=False,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            panel=LAYOUT,
            metavar="SECTION.FIELD=VALUE",
            help="Override a field, as --SECTION.FIELD=VALUE does; the value is YAML. Can be "
            "repeated.",
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        option(
            "--compare",
            panel=DIAGNOSTICS,
            metavar="A B",
            help="Compare the results in folder B with those in folder A; measure nothing.",
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        option(
            "--baseline",
            panel=DIAGNOSTICS,
            metavar="DIR",
            help="After measuring, compare with the earlier results in DIR. The exit code is 10 if "
            "svdpp became slower by more than noise.",
        ),
    ] = None
    results: Annotated[
        Path,
        option(
            "--results",
            panel=DIAGNOSTICS,
            metavar="DIR",
            help="Write results to DIR/EXPERIMENT/RUN/.",
        ),
    ] = Path("results")
    torch_profile: Annotated[
        bool,
        flag(
            "--profile",
            panel=DIAGNOSTICS,
            help="As profile=true: at the end, profile one clip on rank 0 with torch.profiler.",
        ),
    ] = False
