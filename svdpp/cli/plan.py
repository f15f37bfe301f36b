"""`svdpp plan`: shows which rank does what, when, and for how long. Imports no torch."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from svdpp.cli.command import command_settings, typed_options, with_option_groups
from svdpp.cli.console import MAX_ROWS, Console
from svdpp.cli.options.declare import COSTS, LAYOUT, MEMORY, flag, option
from svdpp.cli.options.files import ClipOptions, clips_option
from svdpp.cli.options.model import WithoutAppearance
from svdpp.cli.options.pipeline import COMPARED, Device, PipelineOptions, gpus_option
from svdpp.config import PipelineConfig
from svdpp.config.cost_files import find_costs
from svdpp.config.limits import MAX_CLIPS, check_int, require
from svdpp.driver.request import assumed_costs, describe_assumed_costs
from svdpp.errors import RequestError, pluralize
from svdpp.plan.choose import LayoutForecast, compare_layouts
from svdpp.plan.costs import CostModel
from svdpp.plan.forecast import forecast_layout, simulate_schedule, steady_seconds_per_clip
from svdpp.plan.layout import Layout, check_chunks
from svdpp.plan.split import EXPERTS, MAX_RANKS

#: Version of the JSON of `svdpp plan`.
SCHEMA_VERSION = 2

# Only the first clips are drawn if the number of clips, multiplied by the number of stages, exceeds
# this limit. A picture at the limit takes about a second to draw.
_MAX_DRAWN = 50_000
_MAX_CUTS = 16
_COMPARISON_COLUMNS = ("total", "per min", "first", "mean", "jitter", "GiB", "idle")

#: Fields of `CostModel` that have an option.
_TIME_FIELDS = (
    *("step_seconds", "encode_seconds", "decode_seconds", "transfer_seconds"),
    "inter_host_transfer_seconds",
)
_DEFAULT_WORLD = 4
# Device files of NVIDIA's driver, on Linux and under WSL.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_CLIPS_PER_RANK = 2
# Number of clips for each rank in a comparison of layouts. With so many clips, the start and the
# end of a run hardly matter.
_CLIPS_PER_RANK_TO_COMPARE = 16


app = typer.Typer(add_completion=False)


def _seconds(help: str) -> Any:
    return option(panel=COSTS, metavar="SECONDS", help=help, show_default="that of --costs")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(WithoutAppearance, PipelineOptions, ClipOptions):
    """Options of `svdpp plan`: those of the pipeline and of the forecast.

    Times that are given as options replace the times of `--costs`.
    """

    world: Annotated[int | None, gpus_option("all GPUs, or 4")] = None
    clips: Annotated[
        int | None, clips_option("Number of clips.", "2 for each rank; with --compare 16")
    ] = None
    device: Device = "cuda"
    compare: Annotated[
        bool,
        flag(
            "--compare",
            panel=LAYOUT,
            help="Show every split, auto and data parallel side by side.",
            common=True,
        ),
    ] = False
    hosts: Annotated[
        str | None,
        option(
            panel=LAYOUT,
            metavar="HxG",
            help="Hosts and ranks on each, such as 2x4; transfers between hosts take longer.",
            show_default="all ranks are on one host",
            common=True,
        ),
    ] = None
    expert_boundary: Annotated[
        int | None,
        option(
            panel=LAYOUT,
            metavar="N",
            help="The model changes its expert after N steps, as Wan 2.2 A14B does. Each rank then "
            "does steps of one expert only, and loads no other.",
            show_default="one expert",
        ),
    ] = None
    memory: Annotated[
        bool,
        flag(
            "--memory",
            panel=MEMORY,
            help="Estimate each rank's peak memory from the configuration of --model, without "
            "downloading weights. Takes seconds, since it imports torch.",
            common=True,
        ),
    ] = False
    device_memory: Annotated[
        str | None,
        option(
            panel=MEMORY,
            metavar="GIB,GIB",
            help="Memory of the devices: one number for all, or one for each, such as 79,79,47,47. "
            "--layout auto and --compare leave out layouts that need more.",
            common=True,
        ),
    ] = None
    step_seconds: Annotated[float | None, _seconds("Time of one step, above 0.")] = None
    encode_seconds: Annotated[float | None, _seconds("Time of one clip's encode.")] = None
    decode_seconds: Annotated[float | None, _seconds("Time of one clip's decode.")] = None
    transfer_seconds: Annotated[
        float | None, _seconds("Latency of one transfer from rank to rank.")
    ] = None
    inter_host_transfer_seconds: Annotated[
        float | None,
        _seconds(
            "Latency of one transfer to a rank on another host. A plan over several hosts needs "
            "it, here or in the costs."
        ),
    ] = None

    # These fields are not options of `svdpp plan`, because no plan depends on them.
    threads: int | None = None
    timeout: float = 600.0
    start_timeout: float = 600.0
    checksum: bool = False
    allow_mixed_devices: bool = False
    variant: str | None = None
    latent_shape: tuple[int, int, int, int, int] | None = None
    seed: int | None = None
    channels_last: bool = False
    deterministic: bool = False
    guidance_scale: float | None = None
    max_sequence_length: int | None = None

    def num_clips(self, world_size: int) -> int:
        """Return the number of clips of the forecast: `--clips`, or a fixed number for each rank.

        Args:
            world_size: Number of ranks.

        Raises:
            RequestError: The number of ranks is below 1, or too large to forecast.
        """
        check_int("world_size", world_size, 1, MAX_RANKS)
        per_rank = _CLIPS_PER_RANK_TO_COMPARE if self.compare else _CLIPS_PER_RANK
        return self.clips or max(1, min(per_rank * world_size, MAX_CLIPS))

    def memory_limits(self, world_size: int) -> tuple[float, ...]:
        """Return the memory of each device in GiB, from `--device-memory`; empty without it.

        Args:
            world_size: Number of ranks.

        Raises:
            RequestError: The list has neither one number nor a number for each rank.
        """
        sizes_text = self.device_memory
        if sizes_text is None:
            return ()
        try:
            sizes = tuple(map(float, sizes_text.split(",")))
        except ValueError:
            sizes = ()
        require(
            len(sizes) in (1, world_size) and all(0 < size < math.inf for size in sizes),
            f"--device-memory must be 1 or {world_size} finite numbers above 0, got {sizes_text!r}",
            "use one size for all devices, such as --device-memory 79, or use one for each, such "
            "as --device-memory 79,79,47,47",
            devices=(1, world_size),
            value=sizes_text,
        )
        return sizes if len(sizes) == world_size else sizes * world_size

    def world_and_per_host(self) -> tuple[int | None, int | None]:
        """Return the number of all ranks, and of ranks on a host, from `--gpus` and `--hosts`.

        Returns:
            Number of ranks, None if neither `--gpus` nor `--hosts` is given; and number of ranks on
            each host, None without `--hosts`.

        Raises:
            RequestError: `--hosts` is not HOSTSxRANKS, or disagrees with `--gpus`.
        """
        if self.hosts is None:
            return self.world, None
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", self.hosts, re.ASCII)
        if match is None:
            raise RequestError(
                f"--hosts must be HOSTSxRANKS, such as 2x4, got {self.hosts!r}",
                details={"example": "2x4", "value": self.hosts},
            )
        size, per_host = int(match[1]) * int(match[2]), int(match[2])
        require(
            self.world in (None, size),
            f"--hosts {self.hosts} makes {size} ranks, but `world_size` is {self.world}",
            "leave `world_size` out",
            hosts=self.hosts,
            ranks=size,
            gpus=self.world,
        )
        return size, per_host

    def costs_on(self, ranks_per_host: int | None) -> CostModel:
        """Return the costs for a plan, from `--costs` and the options for single times.

        A time that is given as an option, such as `--step-seconds`, replaces the time in `--costs`.

        With `--memory`, the costs also have the estimated memory of each part of the model.

        Args:
            ranks_per_host: Number of ranks on each host; None: all ranks are on one host.

        Raises:
            RequestError: A time is out of range.
            ModelError: The configuration of `--model` cannot be read.
        """
        times = {name: getattr(self, name) for name in _TIME_FIELDS}
        times = {name: value for name, value in times.items() if value is not None}
        if ranks_per_host is not None:
            times["ranks_per_host"] = ranks_per_host
        if self.costs is None:
            costs = assumed_costs(decodes=True, family=self.family)
        else:
            costs = find_costs(self.costs)
        costs = replace(costs, **times)
        if not self.memory:
            return costs
        from svdpp.driver.resolve import memory_as_costs

        sampling = self.sampling_config(from_image=self.needs_image)
        model = self.model_config(self.device)
        needs = memory_as_costs(model, sampling, self.device, self.checkpoint)
        return replace(costs, **needs)


@app.command(
    **command_settings(
        "svdpp plan --gpus 7 --split alternating",
        "svdpp plan --gpus 8 --clips 100 --compare",
        "svdpp plan --hosts 2x4 --split alternating --inter-host-transfer-seconds 0.002",
    )
)
@with_option_groups
def plan(
    context: typer.Context,
    console: Console,
    options: PlanOptions,
) -> None:
    """Show which rank does which steps, when, and how long it takes.

    `svdpp run` follows this plan with the same options. Times are computed from the costs. The
    default costs are published times of SVD-XT at 576x1024 under TensorRT.
    """
    _check_contradictions(context, options)
    world_size, ranks_per_host = options.world_and_per_host()
    options = replace(options, world=world_size)
    costs = options.costs_on(ranks_per_host)
    request = options.request(
        costs=costs,
        expert_boundary=options.expert_boundary,
        default_world=None if world_size is not None else _default_world(),
    )
    world_size = request.default_world if options.compare else None
    world_size = request.world_size if world_size is None else world_size
    num_clips = options.num_clips(world_size)
    request = replace(request, num_clips=num_clips, memory_gib=options.memory_limits(world_size))
    if options.compare:
        counts = {**request.forecast_arguments, "pairs": request.allows_pairs}
        rows = compare_layouts(**counts)
        about = {name: counts[name] for name in ("num_steps", "world_size")}
        about |= {"clips": num_clips, "layouts": [*map(_row_json, rows)]}
        console.json({"schema_version": SCHEMA_VERSION, **about})
        _print_forecasts(console, rows, num_clips, world_size)
    else:
        config, why = request.resolve()
        if request.choice is None:
            console.info(why)
        # With tiling, the plan needs the number of tiles, which depends on the model's configs.
        if config.model.vae_tiling:
            from svdpp.driver.resolve import resolve_config

            config, _ = resolve_config(config, weights="none", checkpoint=options.checkpoint)
        num_decode_ranks = config.parallel.decode_parallel_size
        if num_decode_ranks is not None and config.chunks:
            check_chunks(num_decode_ranks, config.chunks, are_tiles=bool(config.tiles))
        reason = "" if request.choice is None else request.choice.reason
        show_layout(console, config, num_clips, reason)
    if options.device_memory is not None and costs.denoise_weights_gib is None:
        lacking = "--device-memory has no effect, because the costs do not include memory"
        console.info(f"{lacking}; --memory adds an estimate")
    if options.costs is None and None in (options.step_seconds, options.decode_seconds):
        console.info(describe_assumed_costs(costs))


def _default_world() -> int:
    """Return the number of ranks for a plan: this machine's GPUs; 4 on a machine without GPUs."""
    if not any(map(os.path.exists, _DRIVERS)):
        # Without a device file of NVIDIA's driver there is no GPU, so NVML, whose import takes
        # time, need not be asked.
        return _DEFAULT_WORLD
    from svdpp.launch.gpus import visible_gpus

    with contextlib.suppress(RequestError):  # if the GPUs cannot be used, `svdpp run` reports why
        return len(visible_gpus()) or _DEFAULT_WORLD
    return _DEFAULT_WORLD


def _check_contradictions(context: typer.Context, options: PlanOptions) -> None:
    uses_auto = "auto" in (options.layout, options.parallel.get("cfg_parallel"))
    is_used = options.device_memory is None or options.compare or uses_auto
    require(is_used, "--device-memory has an effect only with --layout auto or --compare")
    is_given = options.memory and options.expert_boundary is not None
    require(not is_given, "--memory reads the boundary from the model: leave out --expert-boundary")
    for name, typed in typed_options(context).items():
        is_shown = options.compare and name in COMPARED
        require(not is_shown, f"--compare shows all layouts: leave out {typed}")


def show_layout(console: Console, config: PipelineConfig, num_clips: int, reason: str = "") -> None:
    """Print the ranks of a layout, a picture of their work, and the forecast of a plan.

    Args:
        console: Console of the command.
        config: Configuration with the layout.
        num_clips: Number of clips of the forecast.
        reason: Reason why `auto` chose this layout; "" if the user gave the layout.
    """
    layout, data_parallel = config.layout, config.data_parallel().layout
    rows = [
        LayoutForecast(name, each, forecast_layout(each, num_clips), steady_seconds_per_clip(each))
        for name, each in (("this layout", layout), ("data parallel", data_parallel))
    ]
    ranks = [_rank_json(layout, rank) for rank in range(layout.world_size)]
    ours, theirs = (_row_json(row)["forecast"] for row in rows)
    times = ("makespan_seconds", "first_clip_seconds", "seconds_per_clip")
    console.json(
        {
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(layout, name) for name in ("num_steps", "world_size", "split")},
            "layout": _layout_json(layout) | {"reason": reason or None},
            "ranks": ranks,
            "costs": layout.costs.to_json(),
            "forecast": {
                "clips": num_clips,
                **ours,
                "data_parallel": {name: theirs[name] for name in times},
            },
        }
    )
    if console.as_json:
        return
    # If all replicas are alike, only the first replica is shown.
    shown = layout.replica_ranks[0] if layout.replicas_are_alike else range(layout.world_size)
    console.show({"ranks": [ranks[rank] for rank in shown]})
    if len(shown) < layout.world_size:
        console.result(
            f"and so on, in {layout.data_parallel_size} replicas of "
            f"{pluralize(layout.replica_size, 'rank')} each"
        )
    if layout.split == "alternating" and 1 < layout.num_stages <= _MAX_CUTS:
        console.result()
        for clip in range(
            0, min(num_clips, 4) * layout.data_parallel_size, layout.data_parallel_size
        ):
            console.result(
                f"steps of clip {clip} are cut at {' '.join(map(str, layout.cuts(clip)[1:-1]))}"
            )
    console.result()
    _print_picture(console, layout, num_clips)
    console.result()
    if reason:
        console.prose(f"auto picks {reason}")
    is_data_parallel = layout.replica_size * layout.cfg_parallel_size == 1
    _print_forecasts(console, rows[:1] if is_data_parallel else rows, num_clips, layout.world_size)


def _rank_json(layout: Layout, rank: int) -> dict[str, Any]:
    role, found = layout.roles[rank], layout.all_shares[rank]._asdict()
    found |= {name: getattr(role, name) for name in ("encode", "denoise", "decode")}
    if layout.decode_parallel_size > 1:
        found["decode_fraction"] = layout.decode_fraction(rank)
    if layout.expert_boundary is not None:
        found["experts"] = [EXPERTS[expert] for expert in sorted(role.experts)]
    if layout.costs.ranks_per_host is not None:
        found["host"] = layout.costs.host_of(rank)
    return found | {"peak_gib": layout.peak_gib[rank]}


def _print_picture(console: Console, layout: Layout, num_clips: int) -> None:
    """Print a picture of the ranks' work over time, for the first clips if there are many."""
    if layout.world_size > MAX_ROWS:
        console.result(f"(no picture: {layout.world_size} ranks are too many)")
        return
    if num_clips > max(1, _MAX_DRAWN // layout.num_stages):
        num_clips = min(num_clips, 4 * layout.world_size)
        console.result(f"the first {num_clips} clips:")
    console.grid(simulate_schedule(layout.schedule(num_clips), layout.costs), layout.world_size)
    console.result("time ->   one sign per clip, < encode, > decode, . idle")


def _layout_json(layout: Layout) -> dict[str, Any]:
    """Return the layout options for the JSON of `svdpp plan`.

    For a model with two experts, also return after how many steps the expert changes, and whether a
    rank may run both experts.
    """
    facts = {"description": str(layout), **layout.parallel.to_json()}
    if layout.expert_boundary is not None:
        facts["expert_boundary"] = layout.expert_boundary
        facts["share_experts"] = layout.share_experts
    return facts


def _print_forecasts(
    console: Console, rows: Sequence[LayoutForecast], num_clips: int, world_size: int
) -> None:
    console.table([_comparison_row(row) for row in rows])
    lines = (
        "",
        f"total: {pluralize(num_clips, 'clip')} on {pluralize(world_size, 'rank')}"
        + _extrapolation(rows),
        "per min: clips finished per minute in a long queue; other times: seconds",
        "first: end of the first clip; mean: from a clip's start to its end",
        "jitter: standard deviation of the seconds between finished clips",
    )
    console.result("\n".join(lines))
    if any(row.name == "pairs" for row in rows):
        console.result("pairs: data parallel with --cfg-parallel 2, for clips with guidance")
    for row in rows:
        if row.note:
            console.prose(f"{row.name}: {console.write_fields(row.note)}")
        roles = () if row.layout is None else row.layout.roles
        if idle := sum(not role.part_names for role in roles):
            console.info(f"warning: {row.name}: {idle} of {world_size} ranks have nothing to do")


def _extrapolation(rows: Sequence[LayoutForecast]) -> str:
    """Return a remark if a forecast is extrapolated from the first clips; else an empty text."""
    forecasts = [row.forecast for row in rows if row.forecast is not None]
    computed = min((each.computed_clips for each in forecasts), default=0)
    if all(each.computed_clips == each.clips for each in forecasts):
        return ""
    return f"; only the first {computed} are simulated, and the same rate is assumed for the others"


def _comparison_row(row: LayoutForecast) -> dict[str, str]:
    forecast, cells = row.forecast, ["-"] * len(_COMPARISON_COLUMNS)
    if forecast is not None and row.layout is not None:
        rate = f"{60 / row.seconds_per_clip:.2f}" if row.seconds_per_clip else "-"
        times = forecast.makespan, forecast.first_clip, forecast.latency, forecast.jitter
        total, *others = (f"{round(time, 3):.4g}" for time in times)
        peaks = [peak for peak in row.layout.peak_gib if peak is not None]
        both = dict.fromkeys(f"{each(peaks):.1f}" for each in (min, max) if peaks)
        cells = [total, rate, *others, "..".join(both) or "-", f"{forecast.bubble:.0%}"]
    return {"layout": row.name, **dict(zip(_COMPARISON_COLUMNS, cells, strict=True))}


def _row_json(row: LayoutForecast) -> dict[str, Any]:
    facts: dict[str, Any] = {"layout": None, "forecast": None}
    if row.forecast is not None and row.layout is not None:
        facts["layout"] = _layout_json(row.layout) | {"peak_gib": row.layout.peak_gib}
        facts["forecast"] = {
            **row.forecast.to_json(),
            "seconds_per_clip": row.seconds_per_clip,
            "jitter_seconds": row.forecast.jitter,
            "latency_seconds": row.forecast.latency,
            "computed_clips": row.forecast.computed_clips,
        }
    return {"name": row.name, "note": row.note or None, **facts}
