"""`svdpp env`: what a result depends on besides the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from svdpp.cli.command import command
from svdpp.cli.console import Console, counted
from svdpp.cli.defaults import load_defaults
from svdpp.cli.options.talk import AnswerOptions


@command(examples=("svdpp env", "svdpp env --json"))
def env(console: Console, answer: AnswerOptions) -> None:
    """Show versions, devices, ffmpeg and settings, ready to paste into a report.

    Settings are the defaults of options that svdpp.toml, [tool.svdpp] of pyproject.toml or a
    variable such as SVDPP_MODEL sets. The home folder is shown as ~. Other variables are shown only
    if they are on a list of harmless names, so no token is shown.
    """
    from svdpp.diagnostics.environment import environment

    defaults = [
        {"option": each.option, "value": each.value, "source": each.source}
        for each in load_defaults().values()
    ]
    facts = {**environment(), "defaults": defaults}
    if answer.as_json:
        console.json(facts)
        return
    lines = list(_lines(facts))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        console.result(f"{name:<{width}}  {value}")


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    host, devices, ffmpeg = facts["host"], facts["devices"], facts["ffmpeg"]
    for name, value in facts["versions"].items():
        yield name, value or "-"
    if facts["git"]:
        yield "git", facts["git"]["sha"] + (", with changes" if facts["git"]["dirty"] else "")
    yield "system", host["system"]
    yield "cpu", f"{host['cpu']}, {host['cpu_capability']}"
    threads = counted(host["torch_threads"], "thread")
    yield "cores", f"{host['usable_cores']} of {host['cores']}, {threads}"
    yield "memory", f"{_gib(host['available_bytes'])} of {_gib(host['memory_bytes'])} free"
    for index, gpu in enumerate(devices["gpus"]):
        yield f"cuda:{index}", f"{gpu['name']}, {_gib(gpu['memory_bytes'])}, sm {gpu['capability']}"
    if len(devices["gpus"]) > 1:
        # A row for each GPU: y where it can read the memory of the GPU in that column.
        rows = ("".join("y" if yes else "-" for yes in row) for row in devices["peer_access"])
        yield "peer access", " ".join(rows)
    if not devices["gpus"]:
        yield "cuda", "no GPU"
    if ffmpeg is None:
        yield "ffmpeg", "none: pip install imageio-ffmpeg"
    else:
        yield "ffmpeg", ffmpeg["version"] or "unknown version"
        yield "ffmpeg path", ffmpeg["path"]
    yield "hub cache", facts["hub_cache"]["path"]
    yield from facts["variables"].items()
    for each in facts["defaults"]:
        yield each["option"], f"{each['value']}, by {each['source']}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
