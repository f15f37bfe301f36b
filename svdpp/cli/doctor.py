"""`svdpp doctor`: checks what a run needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options.files import out_option
from svdpp.cli.options.model import ModelName, WithoutAppearance
from svdpp.cli.options.pipeline import PipelineOptions, WithoutLayout
from svdpp.config import DEFAULT_MODEL, DEMO_MODEL, PipelineConfig
from svdpp.errors import ModelError, pluralize, redact
from svdpp.launch.world import World

#: Widths in characters of the columns with the verdict and the name of each check. A longer name,
#: such as that of some attention backends, shifts the rest of its line.
_VERDICT_WIDTH, _NAME_WIDTH = 8, 24

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(WithoutAppearance, WithoutLayout):
    """Options of `svdpp doctor`, which describe the run to check: model, size, devices, folder."""

    model: ModelName = DEMO_MODEL
    out: Annotated[Path, out_option("Output folder to check (default: out).")] = Path("out")

    # These fields are not options of `svdpp doctor`, because the checks do not depend on them.
    timeout: float = 600.0
    start_timeout: float = 600.0
    checksum: bool = False
    allow_mixed_devices: bool = False
    local_files_only: bool = False
    latent_shape: tuple[int, int, int, int, int] | None = None
    lora: list[str] | None = None
    denoiser: list[str] | None = None
    steps: int | None = None
    seed: int | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    param: list[str] | None = None


@app.command(**command_settings("svdpp doctor", "svdpp doctor --gpus 8 --out clips"))
@with_option_groups
def doctor(
    console: Console,
    launched: World | None,
    options: DoctorOptions,
) -> None:
    """Check in half a minute that a run has what it needs.

    The last check makes a clip of the demo model with one step on each rank, and compares it with
    diffusers. Nothing is downloaded. The exit code is that of the first check that fails.
    """
    config = _config_to_check(launched, options)
    console.info("importing PyTorch and diffusers, then running the checks one by one")
    from svdpp.diagnostics.machine import run_checks

    checks = []
    for found in run_checks(config, options.out):
        detail, fix = console.write_fields(found.detail), console.hint(found.fix)
        check = replace(found, detail=detail, fix=fix)
        checks.append(check)
        indent = " " * (_VERDICT_WIDTH + _NAME_WIDTH)
        start = f"{check.verdict:<{_VERDICT_WIDTH}}{check.name:<{_NAME_WIDTH - 1}} "
        console.prose(f"{start}{redact(detail)}", indent)
        if fix:
            console.prose(f"{indent}fix: {redact(fix)}", indent)
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
        console.info(f"{len(failed)} of {pluralize(len(checks), 'check')} failed")
        raise typer.Exit(failed[0].exit_code)
    ranks = pluralize(config.world_size, f"{config.device} rank")
    console.info(f"{options.model} on {ranks} has what it needs")
    if options.model == DEMO_MODEL:
        console.info(f"svdpp run has another default model: svdpp doctor --model {DEFAULT_MODEL}")


def _config_to_check(launched: World | None, options: PipelineOptions) -> PipelineConfig:
    """Return the configuration of the run that `doctor` checks, with one step for each rank."""
    # The checks download nothing, and have shorter timeouts than a run.
    options = replace(options, local_files_only=True, timeout=120.0, start_timeout=120.0)
    readable, from_image = options, True
    try:
        from_image = options.needs_image
    except ModelError:  # the check of the model, which comes later, reports the error
        readable = replace(options, model=DEMO_MODEL, as_family=None)
    request = readable.request(
        launched=launched,
        # `any_on_cpu`: on a machine without GPUs, every model can be checked
        device=options.device_name(any_on_cpu=True),
        from_image=from_image,
    )
    config = request.with_one_step_per_rank().resolve()[0]
    return replace(config, model=replace(config.model, name=options.model))
