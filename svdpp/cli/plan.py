"""Owns `svdpp plan`: who does what, when, and how long it takes. Never imports torch by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from svdpp.cli.command import command, is_given
from svdpp.cli.console import Console
from svdpp.cli.options.costs import SecondsOptions
from svdpp.cli.options.draft import DraftOptions
from svdpp.cli.options.forecast import ForecastOptions
from svdpp.cli.options.layout import ASSUMED_COSTS, LayoutOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.cli.options.talk import TalkOptions
from svdpp.cli.request import without_world
from svdpp.errors import RequestError

if TYPE_CHECKING:
    from svdpp.cli.plan_report import Request
    from svdpp.plan.costs import Costs

_DEFAULT_WORLD = 4
_SECONDS_OF = {"s": 1, "min": 60, "h": 3600}
# What only --memory asks for, as it is typed.
_OF_MEMORY = {
    **{name: name.replace("_", "-") for name in ("model", "revision", "local_files_only", "dtype")},
    **{"device": "device", "height": "height", "width": "width", "num_frames": "frames"},
    "decode_chunk_size": "decode-chunk-size",
    "memory_opt": "memory-opt",
}


@command(
    examples=(
        "svdpp plan --gpus 7 --split dithered",
        "svdpp plan --gpus 8 --clips 100 --compare",
        "svdpp plan --hosts 2x4 --split dithered --inter-host-transfer-seconds 0.002",
    ),
    common=("world", "clips", "steps", "layout", "split", "costs", "compare", "memory", "as_json"),
    without=(
        *("threads", "timeout", "start_timeout", "checksum", "variant", "latent_shape"),
        *("seed", "fit", "fps", "motion_bucket_id", "noise_aug_strength"),
        *("min_guidance_scale", "max_guidance_scale", "draft_psnr", "channels_last"),
        *("deterministic", "allow_mixed_devices"),
    ),
    defaults={"world": str(_DEFAULT_WORLD), "clips": "2 for each rank; with --compare 16"},
)
def plan(
    context: typer.Context,
    console: Console,
    forecast: ForecastOptions,
    seconds: SecondsOptions,
    sampling: SamplingOptions,
    model: ModelOptions,
    layout: LayoutOptions,
    draft: DraftOptions,
    talk: TalkOptions,  # noqa: ARG001  read where every command is called
    ranks: RankOptions = RankOptions(device="cuda"),
) -> None:
    """Show who does which steps, the picture over time, and how long it takes.

    What is shown is what `svdpp run` does with the same options. Times are those of the costs; the
    published ones that are assumed hold for SVD-XT at 576x1024 under TensorRT.
    """
    from svdpp.cli import plan_report

    world_size, ranks_per_host = _world(forecast.hosts, ranks.world, draft.world(sampling.steps))
    costs = seconds.applied(layout.assumed_costs(), ranks_per_host=ranks_per_host)
    if forecast.memory:
        costs = _with_memory(costs, model, ranks.device, sampling)
    else:
        _refuse_idle(context)
    num_clips = forecast.num_clips(world_size)
    request = plan_report.Request(
        num_clips=num_clips,
        arrivals=_arrivals(forecast.arrivals, num_clips),
        remarks=[
            *_remarks(forecast, layout, seconds, costs, ranks.device),
            *filter(None, [draft.remark(sampling.steps)]),
        ],
    )
    if draft.draft:
        draft.refuse_beside({**layout.given, **forecast.of_queues})
        _show_draft(console, draft, request, costs, (sampling.steps, world_size))
        return
    counts = {"num_steps": sampling.steps, "world_size": world_size, "costs": costs}
    limits = {"num_clips": num_clips, "memory_gib": forecast.limits(world_size)}
    show = _show_comparison if forecast.compare else _show_layout
    try:
        show(console, layout, request, counts, limits)
    except RequestError as error:
        if forecast.hosts is not None:
            error.hint = without_world(error.hint)
        raise


def _show_draft(
    console: Console, draft: DraftOptions, request: Request, costs: Costs, counts: tuple[int, int]
) -> None:
    from svdpp.cli.plan_draft import show_draft_plan
    from svdpp.config import PipelineConfig, SamplingConfig

    num_steps, world_size = counts
    config = PipelineConfig(
        world_size=world_size,
        sampling=SamplingConfig(num_inference_steps=num_steps),
        **draft.settings(num_steps, world_size),
    )
    costs.check_world(world_size)
    show_draft_plan(console, request, config.draft_plan, costs)


def _show_comparison(
    console: Console,
    layout: LayoutOptions,
    request: Request,
    counts: dict[str, Any],
    limits: dict[str, Any],
) -> None:
    from svdpp.cli.plan_compare import show_comparison
    from svdpp.plan.choose import compare_layouts

    layout.leave_to("--compare")
    if layout.layout is not None:
        raise RequestError("--compare shows all layouts: leave out --layout")
    rows = compare_layouts(**counts, **limits, arrivals=request.arrivals)
    show_comparison(console, request, counts, rows)


def _show_layout(
    console: Console,
    layout: LayoutOptions,
    request: Request,
    counts: dict[str, Any],
    limits: dict[str, Any],
) -> None:
    from svdpp.cli.plan_report import show_layout
    from svdpp.plan.layout import Layout

    if layout.layout == "auto":
        from svdpp.plan.choose import choose_layout

        choice = choose_layout(**counts, **limits)
        show_layout(console, request, choice.layout, choice.reason)
        return
    if limits["memory_gib"]:
        raise RequestError(
            "--device-memory is what --layout auto and --compare go by",
            "add --layout auto or --compare, or leave it out",
        )
    show_layout(console, request, Layout(**counts, **layout.fields(counts["world_size"])))


def _world(hosts: str | None, asked: int | None, drafted: int | None) -> tuple[int, int | None]:
    """The number of ranks, and of those on each host where there are several.

    Raises:
        RequestError: `hosts` is none, or contradicts the number that was asked for.
    """
    if hosts is None:
        named = drafted if asked is None else asked
        return (_DEFAULT_WORLD if named is None else named), None
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", hosts, re.ASCII)
    num_hosts, per_host = (int(match[1]), int(match[2])) if match else (0, 0)
    if not num_hosts * per_host:
        raise RequestError(f"--hosts must be hosts x ranks on each, such as 2x4, got {hosts!r}")
    if asked not in (None, num_hosts * per_host):
        raise RequestError(
            f"--hosts {hosts} are {num_hosts * per_host} ranks, --world says {asked}",
            "leave --world out",
        )
    return num_hosts * per_host, per_host


def _with_memory(
    costs: Costs, model: ModelOptions, device: str, sampling: SamplingOptions
) -> Costs:
    """`costs` with the memory that the model's parts will take, whatever they said of it before."""
    from svdpp.config import PipelineConfig
    from svdpp.driver.pipeline import resolve
    from svdpp.models.svd.memory import estimate

    if sampling.measures_chunk:
        raise RequestError(
            "--decode-chunk-size auto is measured on a device", "such as --decode-chunk-size 4"
        )
    asked = PipelineConfig(
        world_size=1,
        model=model.to_config(device),
        sampling=sampling.to_config(model.model, memory_opt=model.memory_opt),
        device=device,
    )
    config, checkpoint = resolve(asked, weights=False)
    estimate_of_parts = estimate(checkpoint, config.model, config.sampling, device=device)
    return replace(costs, **estimate_of_parts.as_costs())  # type: ignore[arg-type]


def _refuse_idle(context: typer.Context) -> None:
    """Refuses what has no effect without --memory."""
    for name, option in _OF_MEMORY.items():
        if is_given(context, name):
            raise RequestError(
                f"--{option} is what --memory is estimated for",
                f"add --memory, or leave out --{option}",
            )


def _remarks(
    forecast: ForecastOptions,
    layout: LayoutOptions,
    seconds: SecondsOptions,
    costs: Costs,
    device: str,
) -> list[str]:
    """What is to be known before the figures are read."""
    remarks = []
    if forecast.memory and device == "cpu":
        remarks.append(
            "memory: what is needed at once; malloc keeps up to as much again as the work"
        )
    if forecast.device_memory is not None and costs.denoise_weights_gib is None:
        remarks.append(
            "--device-memory leaves nothing out: these costs do not say what memory the parts "
            "need; --memory estimates it"
        )
    if layout.costs is None and None in (seconds.step_seconds, seconds.decode_seconds):
        remarks.append(
            f"with the costs of {ASSUMED_COSTS} ({costs.device}); svdpp profile measures yours"
        )
    return remarks


def _arrivals(rate: str | None, num_clips: int) -> list[float]:
    """When each clip arrives; empty where all are there from the start.

    Raises:
        RequestError: `rate` is none.
    """
    if rate is None:
        return []
    from svdpp.plan.large_forecast import poisson_arrivals

    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)/(s|min|h)", rate, re.ASCII)
    per_second = float(match[1]) / _SECONDS_OF[match[2]] if match else 0.0
    if not 0 < per_second <= 1e9:
        raise RequestError(
            f"--arrivals must be clips a second, minute or hour, got {rate!r}",
            "such as --arrivals 2/s, 90/min or 500/h",
        )
    return poisson_arrivals(num_clips, per_second)
