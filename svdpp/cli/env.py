"""`svdpp env`: what a result depends on besides the request."""

from __future__ import annotations

import os
from importlib import import_module

from svdpp.cli.command import command
from svdpp.cli.console import Console
from svdpp.redaction import redact_all


@command(examples=("svdpp env", "svdpp env --json"))
def env(console: Console) -> None:
    """Show versions, devices, ffmpeg and settings, ready to paste into a report.

    Settings are the variables such as SVDPP_MODEL, which set defaults of options. The home folder
    is shown as ~. Other variables are shown only if they are on a list of harmless names, so no
    token is shown.
    """
    from svdpp.cli.app import COMMANDS
    from svdpp.diagnostics.environment import environment

    options = {
        variable: option.opts[0]
        for name in COMMANDS
        for option in getattr(import_module(f"svdpp.cli.{name}"), name).params
        for variable in option.envvar or ()
    }
    defaults = [
        {"variable": name, "value": value, "option": options.get(name, "none has this name")}
        for name, value in sorted(os.environ.items())
        if name.startswith("SVDPP_")
    ]
    console.answer({**environment(), "defaults": redact_all(defaults)})
