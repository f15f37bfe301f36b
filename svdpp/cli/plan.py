"""Owns `svdpp plan`: who does what, when, and what it will cost. Never imports torch."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Annotated, Any

import typer

from svdpp.cli import options, plan_compare, plan_draft, plan_report
from svdpp.cli.console import Console
from svdpp.cli.draft_choice import DraftChoice
from svdpp.cli.layout_choice import LayoutChoice
from svdpp.config import (
    DEFAULT_MODEL,
    DEFAULT_NUM_STEPS,
    ModelConfig,
    PipelineConfig,
    SamplingConfig,
)
from svdpp.errors import RequestError
from svdpp.plan.choose import choose_layout, compare_layouts
from svdpp.plan.costs import Costs
from svdpp.plan.large_forecast import MAX_VISITS, poisson_arrivals
from svdpp.plan.layout import Layout
from svdpp.plan.limits import MAX_RANKS
from svdpp.plan.presets import find_costs

_DEFAULT_WORLD = 4
_DEFAULT_DEVICE = "cuda"
_MEMORY = "Memory"
_CLIPS_PER_RANK = 2
# So many that the edges of the run weigh little beside its steady part.
_CLIPS_PER_RANK_TO_COMPARE = 16
_SECONDS_OF = {"s": 1, "min": 60, "h": 3600}


def plan(
    world: options.World = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HxG",
            help="Hosts, and ranks on each, such as 2x4: hand-overs between hosts take longer. "
            "Default: all ranks are on one.",
            rich_help_panel="Ranks",
        ),
    ] = None,
    steps: options.Steps = DEFAULT_NUM_STEPS,
    clips: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            help="Clips to run, 1 or more. Default: 2 for each rank, to compare 16.",
        ),
    ] = None,
    split: options.SplitOption = None,
    replicas: options.Replicas = None,
    decoders: options.Decoders = None,
    layout: options.LayoutOption = None,
    draft: options.Draft = False,
    start_steps: options.Starts = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Show every split, auto, data parallel and a draft side by side."
        ),
    ] = False,
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Clips come at random, so many on average: 2/s, 90/min or 500/h. "
            "Default: all are there from the start.",
        ),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Estimate each rank's peak memory from the configuration of --model; its weights "
            "are not downloaded. Takes seconds, since it imports torch.",
            rich_help_panel=_MEMORY,
        ),
    ] = False,
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Memory of each device, above 0: auto leaves out layouts that are known to need "
            "more. Default: not looked at.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    revision: options.Revision = None,
    local_files_only: options.LocalFilesOnly = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="cuda|cpu",
            help="What --memory is estimated for.",
            rich_help_panel=_MEMORY,
        ),
    ] = _DEFAULT_DEVICE,
    dtype: options.Dtype = None,
    height: options.Height = None,
    width: options.Width = None,
    frames: options.NumFrames = None,
    decode_chunk_size: options.NumDecodedAtOnce = None,
    costs_of: options.CostsOption = None,
    step_seconds: options.StepSeconds = None,
    encode_seconds: options.EncodeSeconds = None,
    decode_seconds: options.DecodeSeconds = None,
    transfer_seconds: options.TransferSeconds = None,
    inter_host_transfer_seconds: options.InterHostTransferSeconds = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001  read by the guard around every command
) -> None:
    """Show who does which steps, the picture over time, and what it will take.

    Without costs, times are in units of one step and decoding counts for nothing; on real SVD it
    weighs about four steps, so give --costs for an honest forecast.
    """
    drafting = DraftChoice(draft=draft, start_steps=start_steps)
    world = drafting.world(steps) if world is None and hosts is None else world
    world, per_host = (world, None) if hosts is None else _hosts(hosts, world)
    world_size = _DEFAULT_WORLD if world is None else world
    costs = _costs(
        costs_of,
        step_seconds=step_seconds,
        encode_seconds=encode_seconds,
        decode_seconds=decode_seconds,
        transfer_seconds=transfer_seconds,
        inter_host_transfer_seconds=inter_host_transfer_seconds,
        ranks_per_host=per_host,
    )
    sizes = {
        **{"height": height, "width": width, "num_frames": frames},
        "decode_chunk_size": decode_chunk_size,
    }
    if memory:
        from svdpp.cli.request import parse_dtype

        weights = ModelConfig(
            name=model,
            revision=revision,
            local_files_only=local_files_only,
            dtype=parse_dtype(dtype, device),
        )
        costs = _with_memory(costs, weights, device, steps, **sizes)
    else:
        _check_idle(
            model=model,
            revision=revision,
            local_files_only=local_files_only,
            device=device,
            dtype=dtype,
            **sizes,
        )
    num_clips = _num_clips(clips, world_size, compare=compare)
    request = plan_report.Request(
        num_clips=num_clips,
        arrivals=() if arrivals is None else poisson_arrivals(num_clips, _per_second(arrivals)),
        unit="step" if costs_of is None and step_seconds is None else "second",
    )
    console = Console(as_json=as_json, quiet=quiet)
    if memory and device == "cpu":
        console.info("memory: what is needed at once; malloc keeps up to as much again as the work")
    choice = LayoutChoice(split=split, replicas=replicas, decoders=decoders, layout=layout)
    counts: dict[str, Any] = {"num_steps": steps, "world_size": world_size, "costs": costs}
    limits: dict[str, Any] = {
        "num_clips": num_clips,
        "memory_gib": _limits(device_memory, world_size),
    }
    if draft:
        drafting.refuse_beside({**choice.given, "layout": layout, "compare": compare})
        idle = {"clips": clips, "arrivals": arrivals, "device-memory": device_memory}
        drafting.refuse_beside(idle)
        config = PipelineConfig(
            world_size=world_size,
            sampling=SamplingConfig(num_inference_steps=steps),
            **drafting.settings(steps, world_size),
        )
        costs.check_world(world_size)
        plan_draft.show_draft_plan(console, request, config.draft_plan, costs)
    elif compare:
        choice.leave_to("--compare", {**choice.given, **({"layout": layout} if layout else {})})
        rows = compare_layouts(**counts, **limits, arrivals=request.arrivals)
        plan_compare.show_comparison(console, request, counts, rows)
    elif choice.is_auto:
        chosen = choose_layout(**counts, **limits)
        plan_report.show_layout(console, request, chosen.layout, chosen.reason)
    elif device_memory is not None:
        raise RequestError(
            "--device-memory is what --layout auto and --compare go by",
            "add one of them, or leave it out",
        )
    else:
        plan_report.show_layout(console, request, Layout(**counts, **choice.given))


def _hosts(text: str, world: int | None) -> tuple[int, int]:
    """The number of ranks, and of those on each host."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text, re.ASCII)
    num_hosts, per_host = (int(match[1]), int(match[2])) if match else (0, 0)
    if not num_hosts * per_host:
        raise RequestError(f"--hosts must be hosts x ranks on each, such as 2x4, got {text!r}")
    if world not in (None, num_hosts * per_host):
        raise RequestError(
            f"--hosts {text} are {num_hosts * per_host} ranks, --world says {world}",
            "leave --world out",
        )
    return num_hosts * per_host, per_host


def _costs(name: str | None, **seconds: float | None) -> Costs:
    """The costs of that name, with the seconds that are given in place of theirs."""
    costs = Costs() if name is None else find_costs(name)
    return replace(costs, **{name: value for name, value in seconds.items() if value is not None})  # type: ignore[arg-type]


def _with_memory(costs: Costs, model: ModelConfig, device: str, steps: int, **sizes: Any) -> Costs:
    """`costs` with the memory that the model's parts will take, whatever was known of it before."""
    from svdpp.cli import request
    from svdpp.driver.pipeline import resolve
    from svdpp.models.svd.memory import estimate

    asked = PipelineConfig(
        world_size=1,
        model=model,
        sampling=request.sampling_config(model.name, steps, **sizes),
        device=device,
    )
    config, checkpoint = resolve(asked, weights=False)
    estimate_of_parts = estimate(checkpoint, config.model, config.sampling, device=device)
    return replace(costs, **estimate_of_parts.as_costs())  # type: ignore[arg-type]


def _check_idle(**given: Any) -> None:
    """Refuses what only --memory asks for."""
    defaults = {"model": DEFAULT_MODEL, "device": _DEFAULT_DEVICE, "local_files_only": False}
    for name, value in given.items():
        if value != defaults.get(name):
            option = name.removeprefix("num_").replace("_", "-")
            raise RequestError(
                f"--{option} is what --memory is estimated for",
                f"add --memory, or leave out --{option}",
            )


def _num_clips(clips: int | None, world_size: int, *, compare: bool) -> int:
    per_rank = _CLIPS_PER_RANK_TO_COMPARE if compare else _CLIPS_PER_RANK
    num_clips = max(1, per_rank * world_size) if clips is None else clips
    if num_clips < 1:
        raise RequestError(f"--clips must be 1 or more, got {num_clips}")
    if num_clips > MAX_VISITS or world_size > MAX_RANKS:
        raise RequestError(
            f"{num_clips} clips on {world_size} ranks are too many to plan",
            f"--clips {MAX_VISITS} and --world {MAX_RANKS} are the most",
        )
    return num_clips


def _limits(gib: float | None, world_size: int) -> tuple[float, ...]:
    if gib is None:
        return ()
    if not (math.isfinite(gib) and gib > 0):
        raise RequestError(f"--device-memory must be a finite number above 0, got {gib}")
    return (gib,) * world_size


def _per_second(rate: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)/(s|min|h)", rate, re.ASCII)
    per_second = float(match[1]) / _SECONDS_OF[match[2]] if match else 0.0
    if not 0 < per_second <= 1e9:
        raise RequestError(
            f"--arrivals must be clips a second, minute or hour, got {rate!r}",
            "such as --arrivals 2/s, 90/min or 500/h",
        )
    return per_second
