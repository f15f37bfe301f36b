"""Owns the options about what clips are made of: photographs and seeds."""

from dataclasses import dataclass
from typing import Annotated

import typer

from svdpp.cli.options.declare import RECOVERY, VIDEO, flag, option


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Photographs and seeds: a clip of each photograph for each seed."""

    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Image files, folders of images, or quoted globs."),
    ]
    seeds: Annotated[
        str | None,
        option(
            "--seeds",
            panel=VIDEO,
            metavar="LIST",
            help="Several seeds for each photograph, such as 1-8 or 1,3,5-7.",
            default="--seed alone",
        ),
    ] = None
    keep_going: Annotated[
        bool,
        flag(
            "--keep-going",
            panel=RECOVERY,
            help="Make the other clips where some photographs cannot be read; the exit code is "
            "still 7.",
        ),
    ] = False
