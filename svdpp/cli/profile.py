"""`svdpp profile`: measures the costs of plans on the devices of this machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from svdpp.cli.command import COSTS, RECOVERY, command
from svdpp.cli.console import Console
from svdpp.cli.options.files import LogOptions, PromptOptions
from svdpp.cli.options.model import LOOKS
from svdpp.cli.options.pipeline import OF_LAYOUT, PipelineOptions, PipelineRequest
from svdpp.config import PipelineConfig
from svdpp.config.limits import require
from svdpp.launch.world import World, is_member


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(PipelineOptions, PromptOptions):
    """The options of the pipeline, number of repeats, and output file of a measurement."""

    out: Path = COSTS.setting("FILE", "Output file.", "--out", "-o", default=Path("costs.json"))
    repeats: int = COSTS.setting(
        "N",
        "Number of clips to measure after the warm-up; the result is their median.",
        default=3,
        between=(1, None),
    )
    overwrite: bool = RECOVERY.switch("Replace the file if it exists.")


@command(
    examples=(
        "svdpp profile --model demo --device cpu --frames 4",
        "svdpp profile --gpus 8 --out a100.json",
    ),
    without=(
        *(*LOOKS, "checksum", "steps", "seed", "prompts", "negative_prompt", "video"),
        *(*OF_LAYOUT, "costs", "share_experts"),
    ),
)
def profile(console: Console, launched: World | None, options: MeasureOptions) -> None:
    """Measure the costs that plans are based on.

    The costs are the times of encode, step, decode and transfer, and an estimate of the
    memory of each part. All ranks work at the same time, as in a run. On the CPU they share its
    cores, so the costs hold for this number of ranks and threads. Other commands read the file by
    --costs.
    """
    request = PipelineRequest(options=options, num_clips=None, launched=launched)
    config = request.with_a_step_each().resolve()[0]
    if is_member(launched):
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

    hint = "--overwrite replaces it, --out names another file"
    require(overwrite or not path.is_file(), f"{str(path)!r} exists already", hint)
    output_files.check_free(str(path))
    output_files.check_writable(path.absolute().parent)


def _measure(console: Console, config: PipelineConfig, options: MeasureOptions) -> None:
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
    console.answer(costs.to_json())
    path = shlex.quote(str(options.out))
    console.info(f"wrote {path}")
    console.info(f"next: svdpp plan --world {config.world_size} --costs {path} --compare")
