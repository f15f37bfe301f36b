"""Owns `svdpp doctor`: tries what a run will need, and names the mend of what fails."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from svdpp.cli import options
from svdpp.cli.console import Console
from svdpp.config import DEFAULT_MODEL, DEFAULT_NUM_STEPS, DEMO_MODEL, ModelConfig
from svdpp.redaction import redact, redact_all

if TYPE_CHECKING:
    from svdpp.diagnostics.doctor import Check

_COLOURS = {"ok": "green", "failed": "bold red", "skipped": "dim"}


def doctor(
    context: typer.Context,
    world: options.World = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder the clips would go to.")
    ] = Path("out"),
    model: options.Model = DEMO_MODEL,
    revision: options.Revision = None,
    variant: options.Variant = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|cuda:N",
            help="Default: cuda where there is one, else cpu.",
            rich_help_panel="Ranks",
        ),
    ] = None,
    dtype: options.Dtype = None,
    height: options.Height = None,
    width: options.Width = None,
    frames: options.NumFrames = None,
    decode_chunk_size: options.NumDecodedAtOnce = None,
    memory_opt: options.MemoryOpt = False,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,  # noqa: ARG001  read by the guard around every command
) -> None:
    """Try what a run will need, in seconds: devices, transfers, ffmpeg, model, memory, determinism.

    Nothing is downloaded. The exit code is that of the first check that failed.
    """
    from svdpp.cli import request
    from svdpp.diagnostics.doctor import Examination, examine

    chosen = device or request.default_device()
    default_world = request.default_world(chosen, DEFAULT_NUM_STEPS, on_cpu=2)
    world_size = default_world if world is None else world
    config = request.pipeline_config(
        model=ModelConfig(
            name=model,
            revision=revision,
            variant=variant,
            dtype=request.parse_dtype(dtype, chosen),
            memory_opt=memory_opt,
        ),
        sampling=request.sampling_config(
            model,
            world_size,
            memory_opt=memory_opt,
            height=height,
            width=width,
            num_frames=frames,
            decode_chunk_size=decode_chunk_size,
        ),
        plan={"world_size": world_size},
        device=chosen,
        threads=threads,
        timeout=120.0,
        start_timeout=120.0,
    )
    console = Console(as_json=as_json)
    checks = []
    for check in examine(Examination(config, out)):
        checks.append(check)
        _print(console, check)
    failed = [check for check in checks if check.verdict == "failed"]
    if as_json:
        listed = redact_all([asdict(check) for check in checks])
        examined = {"model": model, "device": chosen, "world_size": world_size}
        about = {"schema_version": 1, "healthy": not failed, "examined": redact_all(examined)}
        console.json({**about, "checks": listed})
    if failed:
        console.info(f"{len(failed)} of {len(checks)} checks failed")
        raise typer.Exit(failed[0].exit_code)
    ranks = f"{world_size} {chosen} rank{'s' if world_size > 1 else ''}"
    console.info(f"a run of {model} on {ranks} will find what it needs")
    of_run = {} if options.is_given(context, "model") else {"model": DEFAULT_MODEL}
    of_run |= {} if device is not None or chosen == "cuda" else {"device": "cuda"}
    if of_run:
        wanted = " ".join(f"--{name} {value}" for name, value in of_run.items())
        names = " and ".join(of_run)
        console.info(f"svdpp run takes another {names} by default: to examine that add {wanted}")


def _print(console: Console, check: Check) -> None:
    """One line a check, folded under itself where the terminal is narrow."""
    head = f"{check.verdict:<8}{check.name:<18}"
    width = max(40, console.out.width) - 1
    lines = textwrap.wrap(redact(check.detail), width - len(head))
    for line in lines or [""]:
        console.result(Text.assemble((head, _COLOURS[check.verdict]), line))
        head = " " * len(head)
    mend = f"mend: {redact(check.mend)}" if check.mend else ""
    for line in textwrap.wrap(mend, width - len(head)):
        console.result(head + line)
