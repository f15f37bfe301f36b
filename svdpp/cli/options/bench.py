"""Owns the options of `svdpp bench`: a configuration to measure, or two results to compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli.options.declare import DIAGNOSTICS, LAYOUT, flag, option


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured, or compared."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG [--SECTION.FIELD=VALUE]...",
            help="A YAML file, or the name of one that comes with svdpp: smoke (CPU, a minute or "
            "two), svd-xt (all GPUs). A list for a field measures each value.",
            show_default=False,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            panel=LAYOUT,
            metavar="SECTION.FIELD=VALUE",
            help="Override a field, as --SECTION.FIELD=VALUE does; the value is YAML. Repeatable.",
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        option(
            "--compare",
            panel=DIAGNOSTICS,
            metavar="A B",
            help="Instead of measuring, compare the results in folder B with those in folder A.",
        ),
    ] = None
    results: Annotated[
        Path,
        option(
            "--results",
            panel=DIAGNOSTICS,
            metavar="DIR",
            help="Results go to DIR/EXPERIMENT/RUN/.",
        ),
    ] = Path("results")
    profile: Annotated[
        bool,
        flag(
            "--profile",
            panel=DIAGNOSTICS,
            help="As profile=true: afterwards look at one clip on rank 0 with torch.profiler.",
        ),
    ] = False
