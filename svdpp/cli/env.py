"""`svdpp env`: what a result depends on besides the request."""

from __future__ import annotations

from typing import Any

from svdpp.cli.command import command
from svdpp.cli.console import Console
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
    else:
        _print(console, facts)


def _print(console: Console, facts: dict[str, Any]) -> None:
    host, versions = facts["host"], facts["versions"]
    lines: list[tuple[str, Any]] = [(name, value or "-") for name, value in versions.items()]
    if facts["git"]:
        state = ", with changes" if facts["git"]["dirty"] else ""
        lines.append(("git", facts["git"]["sha"] + state))
    lines += [
        ("system", host["system"]),
        ("cpu", f"{host['cpu']}, {host['cpu_capability']}"),
        ("cores", f"{host['usable_cores']} of {host['cores']}, {host['torch_threads']} threads"),
        ("memory", f"{_gib(host['available_bytes'])} of {_gib(host['memory_bytes'])} free"),
        *_gpu_lines(facts["devices"]),
        ("determinism", _switches(facts["determinism"])),
        *_ffmpeg_lines(facts["ffmpeg"]),
        ("hub cache", facts["hub_cache"]["path"]),
        ("svd models", ", ".join(facts["hub_cache"]["svd_models"]) or "none in the cache"),
        *((name, value) for name, value in facts["variables"].items()),
        *((each["option"], f"{each['value']}, by {each['source']}") for each in facts["defaults"]),
    ]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        console.result(f"{name:<{width}}  {value}")


def _gpu_lines(devices: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        (f"cuda:{index}", f"{one['name']}, {_gib(one['memory_bytes'])}, sm {one['capability']}")
        for index, one in enumerate(devices["gpus"])
    ]
    if len(lines) > 1:
        # A row for each GPU: y where it can read the memory of the GPU in that column.
        rows = ("".join("y" if yes else "-" for yes in row) for row in devices["peer_access"])
        lines.append(("peer access", " ".join(rows)))
    return lines or [("cuda", "no GPU")]


def _switches(flags: dict[str, bool]) -> str:
    on = [name.replace("_", " ") for name, value in flags.items() if value]
    return f"on in this process: {', '.join(on) or 'none'}; ranks set their own"


def _ffmpeg_lines(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return [("ffmpeg", "none: pip install imageio-ffmpeg")]
    return [("ffmpeg", found["version"] or "unknown version"), ("ffmpeg path", found["path"])]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
