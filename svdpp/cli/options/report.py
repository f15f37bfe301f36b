"""Owns the options of a report on a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli.options.declare import DIAGNOSTICS, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The run, and where the page goes."""

    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a run, or its run.json.",
            show_default=False,
        ),
    ]
    html: Annotated[
        Path | None,
        option(
            "--html",
            panel=DIAGNOSTICS,
            metavar="FILE.html",
            help="Also write the report as one page.",
            default="write none",
        ),
    ] = None
