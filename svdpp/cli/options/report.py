"""Owns the options of a report on a run or a bench."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli.options.declare import DIAGNOSTICS, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The run or the bench, and where the page goes."""

    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a run or of a bench, or a run.json.",
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
