"""`svdpp plan`: which rank does what, when, and for how long; imports no torch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from svdpp.cli.command import command, given_options, is_given
from svdpp.cli.console import Console
from svdpp.cli.options.forecast import ForecastOptions, SecondsOptions
from svdpp.cli.options.layout import ASSUMED_COSTS, LayoutOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import PROMPT_FIELDS, SamplingOptions
from svdpp.cli.options.talk import TalkOptions
from svdpp.cli.request import experts_of, needs_image, pairs_of, without_world
from svdpp.errors import RequestError

if TYPE_CHECKING:
    from svdpp.cli.plan_report import Request
    from svdpp.plan.choose import Pairs
    from svdpp.plan.costs import Costs

_DEFAULT_WORLD = 4
_SECONDS_OF = {"s": 1, "min": 60, "h": 3600}
# Options of the model: without --memory only a choice of pairs reads it.
_OF_MODEL = ("model", "revision", "local_files_only")
# Options that only --memory uses.
_OF_MEMORY = (
    *("dtype", "device", "height", "width", "num_frames", "decode_chunk_size"),
    *("memory_opt", "lora"),
)


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
        *("min_guidance_scale", "max_guidance_scale", "channels_last"),
        *("deterministic", "allow_mixed_devices"),
        *(name for name in PROMPT_FIELDS if name != "param"),
    ),
    defaults={"world": str(_DEFAULT_WORLD), "clips": "2 for each rank; with --compare 16"},
)
def plan(
    context: click.Context,
    console: Console,
    forecast: ForecastOptions,
    seconds: SecondsOptions,
    sampling: SamplingOptions,
    model: ModelOptions,
    layout: LayoutOptions,
    talk: TalkOptions,  # noqa: ARG001  read where every command is called
    ranks: RankOptions = RankOptions(device="cuda"),
) -> None:
    """Show which rank does which steps, when, and how long it takes.

    `svdpp run` follows this plan with the same options. Times come from the costs. The default
    costs are published ones, of SVD-XT at 576x1024 under TensorRT.
    """
    from svdpp.cli.plan_report import Request

    chooses_pairs = forecast.compare or layout.chooses_pairs
    if not forecast.memory:
        _refuse_idle(context, for_pairs=chooses_pairs)
    _check_experts(layout, forecast)
    has_model = is_given(context, "model")
    family = model.family if forecast.memory or has_model else "svd"
    world_size, ranks_per_host = _world(forecast.hosts, ranks.world)
    costs = seconds.applied(layout.assumed_costs(family=family), ranks_per_host=ranks_per_host)
    boundary = forecast.expert_boundary
    if forecast.memory:
        costs, boundary = _with_memory(costs, model, ranks.device, sampling)
    num_clips = forecast.num_clips(world_size)
    remarks = _remarks(forecast, layout, seconds, costs, ranks.device)
    limits: dict[str, Any] = {"num_clips": num_clips, "memory_gib": forecast.limits(world_size)}
    if chooses_pairs:
        asked = model if has_model else None
        boundary, pairs, why_not = _about_pairs(asked, sampling, boundary, ranks)
        limits["pairs"] = pairs
        remarks += [why_not] if why_not and layout.cfg_parallel == "auto" else []
    if forecast.compare or layout.chooses:
        limits["sooner"] = num_clips < world_size
    arrivals = _arrivals(forecast.arrivals, num_clips)
    request = Request(num_clips=num_clips, arrivals=arrivals, remarks=remarks)
    counts = {
        "num_steps": sampling.num_steps(family),
        "world_size": world_size,
        "costs": costs,
        "expert_boundary": boundary,
        "share_experts": layout.share_experts,
    }
    show = _show_comparison if forecast.compare else _show_layout
    try:
        show(console, layout, request, counts, limits)
    except RequestError as error:
        if forecast.hosts is not None:
            error.hint = without_world(error.hint)
        raise


def _about_pairs(
    model: ModelOptions | None, sampling: SamplingOptions, boundary: int | None, ranks: RankOptions
) -> tuple[int | None, Pairs, str]:
    """The boundary of a model's experts, None for the default one; if there may be pairs, why not.

    A model of which only the boundary between its experts is given has two calls in each step.
    """
    if model is None:
        return boundary, "unproven" if boundary is None else "exact", ""
    sampled = sampling.to_config(model, from_image=needs_image(model))
    if boundary is None:
        boundary = experts_of(model.to_config("cpu"), sampled).get("expert_boundary")
    return boundary, *pairs_of(model, sampled, ranks)


def _show_comparison(
    console: Console,
    layout: LayoutOptions,
    request: Request,
    counts: dict[str, Any],
    limits: dict[str, Any],
) -> None:
    from svdpp.cli.plan_report import show_comparison
    from svdpp.plan.compare import compare_layouts

    layout.leave_to("--compare")
    for option in layout.given:
        raise RequestError(f"--compare shows all layouts: leave out --{option}")
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
    from svdpp.plan.choose import choose_layout
    from svdpp.plan.layout import Layout

    memory, world_size = limits["memory_gib"], counts["world_size"]
    if layout.chooses:
        choice = choose_layout(
            **counts, **limits, cfg_parallel=layout.pair_size, fixed=layout.fixed
        )
        cards = choice.cards or range(world_size)
        unequal = {card: memory[card] for card in cards} if len(set(memory)) > 1 else {}
        show_layout(console, request, choice.layout, choice.reason, unequal)
        return
    if memory:
        raise RequestError(
            "--device-memory has an effect only with --layout auto or --compare",
            "add one of them, or leave --device-memory out",
        )
    show_layout(console, request, Layout(**counts, **layout.fields(world_size)))


def _world(hosts: str | None, asked: int | None) -> tuple[int, int | None]:
    """The number of ranks, and of ranks per host if there are several hosts."""
    if hosts is None:
        return (_DEFAULT_WORLD if asked is None else asked), None
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", hosts, re.ASCII)
    num_hosts, per_host = (int(match[1]), int(match[2])) if match else (0, 0)
    if not num_hosts * per_host:
        raise RequestError(
            f"--hosts must be HOSTSxRANKS, such as 2x4 for 2 hosts of 4 ranks, got {hosts!r}"
        )
    if asked not in (None, num_hosts * per_host):
        raise RequestError(
            f"--hosts {hosts} makes {num_hosts * per_host} ranks, but --world is {asked}",
            "leave --world out",
        )
    return num_hosts * per_host, per_host


def _with_memory(
    costs: Costs, model: ModelOptions, device: str, sampling: SamplingOptions
) -> tuple[Costs, int | None]:
    """`costs` with the estimated memory of the model's parts, and the boundary of its experts."""
    from svdpp.config import PipelineConfig
    from svdpp.driver.resolve import resolve
    from svdpp.models.memory import estimate

    if sampling.measures_chunk:
        raise RequestError(
            "--decode-chunk-size auto needs a device with free memory, and a plan has none",
            "give a number, such as --decode-chunk-size 4",
        )
    asked = PipelineConfig(
        world_size=1,
        model=model.to_config(device),
        sampling=sampling.to_config(model, from_image=needs_image(model)),
        device=device,
    )
    config, checkpoint = resolve(asked, weights="none")
    estimate_of_parts = estimate(checkpoint, config.model, config.sampling, device=device)
    costs = replace(costs, **estimate_of_parts.as_costs())  # type: ignore[arg-type]
    return costs, config.expert_boundary


def _check_experts(layout: LayoutOptions, forecast: ForecastOptions) -> None:
    if layout.share_experts and forecast.expert_boundary is None and not forecast.memory:
        raise RequestError(
            "--share-experts has an effect only with --expert-boundary",
            "add --expert-boundary N, or leave out --share-experts",
        )
    if forecast.expert_boundary is not None and forecast.memory:
        raise RequestError(
            "with --memory the model gives the boundary between its experts",
            "leave out --expert-boundary",
        )


def _refuse_idle(context: click.Context, *, for_pairs: bool) -> None:
    """Refuses options that have no effect without --memory, or a choice of pairs for the model."""
    idle = _OF_MEMORY if for_pairs else (*_OF_MODEL, *_OF_MEMORY)
    for name, option in given_options(context).items():
        if name in idle:
            raise RequestError(
                f"{option} has an effect only with --memory", f"add --memory, or leave out {option}"
            )


def _remarks(
    forecast: ForecastOptions,
    layout: LayoutOptions,
    seconds: SecondsOptions,
    costs: Costs,
    device: str,
) -> list[str]:
    remarks = []
    if forecast.memory and device == "cpu":
        remarks.append(
            "memory: as in use at the same time; malloc may keep up to twice the working memory"
        )
    if forecast.device_memory is not None and costs.denoise_weights_gib is None:
        remarks.append(
            "--device-memory leaves out no layout: these costs do not include memory; --memory "
            "estimates it"
        )
    if layout.costs is None and None in (seconds.step_seconds, seconds.decode_seconds):
        remarks.append(
            f"by the costs of {ASSUMED_COSTS} ({costs.device}); svdpp profile measures yours"
            if costs.device
            else "no times are known for this model: a step counts as 1 s, and all else as 0 s, "
            "unless an option gives its time; --costs gives them all"
        )
    return remarks


def _arrivals(rate: str | None, num_clips: int) -> list[float]:
    """When each clip arrives, in seconds; empty if all are present at the start."""
    if rate is None:
        return []
    from svdpp.plan.large_forecast import poisson_arrivals

    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)/(s|min|h)", rate, re.ASCII)
    per_second = float(match[1]) / _SECONDS_OF[match[2]] if match else 0.0
    if not 0 < per_second <= 1e9:
        raise RequestError(
            f"--arrivals must be clips per s, min or h, got {rate!r}",
            "such as --arrivals 2/s, 90/min or 500/h",
        )
    return poisson_arrivals(num_clips, per_second)
