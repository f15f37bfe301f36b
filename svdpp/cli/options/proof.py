"""Owns the options of a proof: inputs, tolerance, faults, report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli.options.declare import DIAGNOSTICS, option
from svdpp.cli.options.inputs import ClipOptions
from svdpp.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class ProofOptions(ClipOptions):
    """Inputs, tolerance and report of a proof."""

    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT...|CLIP...]",
            help="Image files, folders or globs; or finished clips to recompute: files, their "
            "JSON, or a folder of them.",
            show_default="a photograph that comes with svdpp",
        ),
    ] = None
    tolerance: Annotated[
        float,
        option(
            "--tolerance",
            panel=DIAGNOSTICS,
            metavar="ATOL",
            help="Largest difference that counts as equal; 0 requires equal bits.",
        ),
    ] = 0.0
    inject_fault: Annotated[
        str | None,
        option(
            "--inject-fault",
            panel=DIAGNOSTICS,
            metavar="FAULT",
            help="Damage the pipelined run on purpose, to see that verify notices: ulp@rank1.clip0 "
            "changes one number by one ULP (the next float), skip@rank1.clip0 skips a step. The "
            "first rank and clip are 0.",
        ),
    ] = None
    report: Annotated[
        Path | None,
        option(
            "--report",
            panel=DIAGNOSTICS,
            metavar="FILE.html",
            help="Write verdict, checks, frames of both runs and their difference as one page.",
        ),
    ] = None

    image: Annotated[
        Path | None,
        option(
            "--image",
            panel=DIAGNOSTICS,
            metavar="PATH",
            help="For finished clips: their photograph, or the folder that contains it.",
            default="the path in the clip's metadata, or beside the clip",
        ),
    ] = None

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise RequestError(f"--tolerance must be 0 or more, got {self.tolerance}")
