"""Owns the options of `svdpp profile`: inputs, number of repeats, output file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli.options.declare import COSTS, option
from svdpp.cli.options.outputs import OverwriteOptions
from svdpp.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(OverwriteOptions):
    """Inputs, number of repeats, and output file of a measurement."""

    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PHOTO...]",
            help="With --draft: the photographs to measure with.",
            show_default="the photographs that come with svdpp",
        ),
    ] = None
    out: Annotated[
        Path | None,
        option(
            *("--out", "-o"),
            panel=COSTS,
            metavar="FILE",
            help="Output file.",
            default="costs.json; with --draft draft.json",
        ),
    ] = None
    repeats: Annotated[
        int,
        option(
            "--repeats",
            panel=COSTS,
            metavar="N",
            help="Number of clips to measure after the warm-up; the result is their median.",
        ),
    ] = 3

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise RequestError(f"--repeats must be 1 or more, got {self.repeats}")
