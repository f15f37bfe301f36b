"""`svdpp profile`: measures the costs of plans on the devices of this machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options.declare import COSTS, RECOVERY, flag, in_range, option, path_option
from svdpp.cli.options.files import LogOptions, PromptOptions
from svdpp.cli.options.model import WithoutAppearance
from svdpp.cli.options.pipeline import WithoutLayout
from svdpp.config import PipelineConfig
from svdpp.config.limits import require
from svdpp.launch.world import World, is_secondary_rank

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(WithoutAppearance, WithoutLayout, PromptOptions):
    """Options of `svdpp profile`: pipeline, number of repeats, and output file."""

    out: Annotated[
        Path,
        path_option("--out", "-o", panel=COSTS, metavar="FILE", help="Output file.", common=True),
    ] = Path("costs.json")
    repeats: Annotated[
        int,
        option(
            panel=COSTS,
            metavar="N",
            help="Number of clips to measure after the warm-up; the result is their median.",
            callback=in_range(1),
            common=True,
        ),
    ] = 3
    overwrite: Annotated[
        bool,
        flag("--overwrite", panel=RECOVERY, help="Replace the file if it exists.", common=True),
    ] = False

    # These fields are not options of `svdpp profile`, because the costs do not depend on them.
    checksum: bool = False
    steps: int | None = None
    seed: int | None = None
    prompts: Path | None = None
    negative_prompt: str | None = None
    last_image: Path | None = None
    reference: list[Path] | None = None
    video: list[str] | None = None


@app.command(
    **command_settings(
        "svdpp profile --model demo --device cpu --frames 4",
        "svdpp profile --gpus 8 --out a100.json",
    )
)
@with_option_groups
def profile(console: Console, launched: World | None, options: ProfileOptions) -> None:
    """Measure the costs that plans are based on.

    The costs are the times of encode, step, decode and transfer, and an estimate of the
    memory of each part. All ranks work at the same time, as in a run. On a CPU the ranks share the
    cores, so the costs hold for this number of ranks and threads. The costs are written to a file,
    which other commands read with --costs.
    """
    request = options.request(launched=launched)
    config = request.with_one_step_per_rank().resolve()[0]
    if is_secondary_rank(launched):
        from svdpp.cli.progress import serve_member
        from svdpp.diagnostics.machine import measured_config
        from svdpp.driver.pipeline import Pipeline

        LogOptions().open(console, launched)
        serve_member(Pipeline(measured_config(config)), launched, console)
        return
    _check_free(options.out, overwrite=options.overwrite)
    _measure(console, config, options)


def _check_free(path: Path, *, overwrite: bool) -> None:
    from svdpp.media import output_files

    hint = "--overwrite replaces it; --out names another file"
    is_free = overwrite or not path.is_file()
    require(is_free, f"{str(path)!r} exists already", hint, path=str(path))
    output_files.check_replaceable(str(path))
    output_files.check_writable(path.absolute().parent)


def _measure(console: Console, config: PipelineConfig, options: ProfileOptions) -> None:
    from svdpp.cli.progress import Progress
    from svdpp.diagnostics.machine import profile as measure
    from svdpp.media import output_files

    costs = measure(
        config,
        repeats=options.repeats,
        log=console.info,
        open_observer=partial(Progress, console, costs=config.costs),
        prompt=options.prompt,
    )
    output_files.write_json(options.out, costs.to_json())
    console.report(costs.to_json())
    path = shlex.quote(str(options.out))
    console.info(f"wrote {path}")
    console.info(f"next: svdpp plan --world {config.world_size} --costs {path} --compare")
