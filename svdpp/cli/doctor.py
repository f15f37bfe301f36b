"""`svdpp doctor` checks what a run needs; `svdpp env` shows what results depend on."""

from __future__ import annotations

import os
from dataclasses import asdict, replace

import click

from svdpp.cli.command import command
from svdpp.cli.console import Console, counted
from svdpp.cli.options.files import OutputOptions
from svdpp.cli.options.model import LOOKS, PROMPT_FIELDS
from svdpp.cli.options.pipeline import OF_LAYOUT, PipelineOptions, PipelineRequest
from svdpp.config import DEFAULT_MODEL, DEMO_MODEL, PipelineConfig
from svdpp.errors import ModelError, redact
from svdpp.launch.world import World


@command(
    examples=("svdpp doctor", "svdpp doctor --gpus 8 --out clips"),
    without=(
        *("timeout", "start_timeout", "checksum", "local_files_only", "latent_shape", "steps"),
        *(*LOOKS, *PROMPT_FIELDS, "seed", "allow_mixed_devices", "lora"),
        *(*OF_LAYOUT, "costs", "share_experts"),
        *("format", "crf", "resume", "overwrite", "latents_dir", "dry_run"),
    ),
    meanings={"out": "Output folder to check."},
)
def doctor(
    console: Console,
    launched: World | None,
    folder: OutputOptions,
    options: PipelineOptions = PipelineOptions(model=DEMO_MODEL),
) -> None:
    """Check in half a minute that a run has what it needs.

    The last check cuts a clip of the demo model after each step. Nothing is downloaded. The exit
    code is that of the first check that fails.
    """
    config = _examined(launched, options)
    console.info("importing PyTorch and diffusers, then trying one thing after the other")
    from svdpp.diagnostics.machine import examine

    checks = []
    for check in examine(config, folder.out):
        checks.append(check)
        console.prose(f"{check.verdict:<8}{check.name:<18}{redact(check.detail)}", " " * 26)
        if check.fix:
            console.prose(f"{'':26}fix: {redact(check.fix)}", " " * 26)
    failed = [check for check in checks if check.verdict == "failed"]
    examined = {name: getattr(config, name) for name in ("device", "world_size")}
    console.json(
        {
            "schema_version": 1,
            "healthy": not failed,
            "examined": {"model": options.model, **examined},
            "checks": [asdict(check) for check in checks],
        }
    )
    if failed:
        console.info(f"{len(failed)} of {len(checks)} checks failed")
        raise click.exceptions.Exit(failed[0].exit_code)
    ranks = counted(config.world_size, f"{config.device} rank")
    console.info(f"{options.model} on {ranks} has what it needs")
    if options.model == DEMO_MODEL:
        console.info(f"svdpp run has another default: svdpp doctor --model {DEFAULT_MODEL}")


def _examined(launched: World | None, options: PipelineOptions) -> PipelineConfig:
    # Nothing is downloaded.
    options = replace(options, local_files_only=True, timeout=120.0, start_timeout=120.0)
    readable, from_image = options, True
    try:
        from_image = options.needs_image
    except ModelError:  # one of the checks will say so
        readable = replace(options, model=DEMO_MODEL, as_family=None)
    request = PipelineRequest(
        options=readable,
        num_clips=None,
        launched=launched,
        device=options.device_name(any_on_cpu=True),  # also on a machine without GPUs
        from_image=from_image,
    )
    config = request.with_a_step_each().resolve()[0]
    return replace(config, model=replace(config.model, name=options.model))


@command(examples=("svdpp env", "svdpp env --json"))
def env(console: Console) -> None:
    """Show versions, devices, ffmpeg and settings, ready to paste into a report.

    Settings are the variables such as SVDPP_MODEL, which set defaults of options. The home folder
    is shown as ~. Other variables are shown only if they are on a list of harmless names, so no
    token is shown.
    """
    from svdpp.diagnostics.machine import environment

    named = sorted(name for name in os.environ if name.startswith("SVDPP_"))
    defaults = {name: redact(os.environ[name]) for name in named}
    console.answer({**environment(), "defaults": defaults})
