"""`svdpp env`: shows versions, devices and settings on which results depend."""

from __future__ import annotations

import os

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options.declare import VARIABLES
from svdpp.errors import redact

app = typer.Typer(add_completion=False)


@app.command(**command_settings("svdpp env", "svdpp env --json"))
@with_option_groups
def env(console: Console) -> None:
    """Show versions, devices, ffmpeg and settings, ready to paste into a report.

    Settings are environment variables that set the defaults of options. The home folder is shown as
    ~. Other variables are shown only if they are on a list of harmless names, so no token is shown.
    """
    from svdpp.diagnostics.machine import environment

    named = sorted(name for name in os.environ if name.startswith("SVDPP_"))
    defaults = {name: redact(os.environ[name]) for name in named if name in VARIABLES}
    others = [name for name in named if name not in VARIABLES]
    console.report({**environment(), "defaults": defaults, "without_effect": others})
