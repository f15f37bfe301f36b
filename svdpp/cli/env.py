"""`svdpp env`: what a result depends on besides the request."""

from __future__ import annotations

from svdpp.cli.command import command
from svdpp.cli.console import Console
from svdpp.cli.defaults import load_defaults


@command(examples=("svdpp env", "svdpp env --json"))
def env(console: Console) -> None:
    """Show versions, devices, ffmpeg and settings, ready to paste into a report.

    Settings are the defaults of options that svdpp.toml, [tool.svdpp] of pyproject.toml or a
    variable such as SVDPP_MODEL sets. The home folder is shown as ~. Other variables are shown only
    if they are on a list of harmless names, so no token is shown.
    """
    from svdpp.diagnostics.environment import environment

    defaults = [
        {"option": each.names[0], "value": each.value, "source": each.source}
        for each in load_defaults().values()
    ]
    console.answer({**environment(), "defaults": defaults})
