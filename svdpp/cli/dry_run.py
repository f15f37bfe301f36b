"""Owns `svdpp run --dry-run`: the clips of a run, its time, memory and disk space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import Console, counted
from svdpp.cli.run_request import RunRequest
from svdpp.config import PipelineConfig

if TYPE_CHECKING:
    from svdpp.diagnostics.memory_estimate import RankMemory
    from svdpp.driver.jobs import ClipPlan
    from svdpp.media.inputs import ClipInput
    from svdpp.plan.forecast import Forecast

_MAX_NAMES = 20
# A draft makes one clip after the other, so the time of more clips is proportional.
_MAX_DRAFTS = 64


def show_dry_run(
    console: Console,
    asked: RunRequest,
    config: PipelineConfig,
    found: Sequence[ClipInput],
    remarks: Sequence[str],
) -> None:
    """Checks a run completely, and prints what it would make."""
    from svdpp.diagnostics.memory_estimate import estimate_ranks
    from svdpp.driver.jobs import check_outputs, plan_clips
    from svdpp.driver.resolve import resolve

    policy = asked.policy
    config, checkpoint = resolve(config, weights="none")
    assert checkpoint is not None
    check_outputs(found, asked.seeds, policy, config.draft)
    clips = plan_clips(found, asked.seeds, policy, config, checkpoint)
    num_clips = len(clips.requests)
    forecast = _forecast(config, num_clips) if num_clips and asked.knows_costs else None
    memory = estimate_ranks(config, weights="none")
    disk = _disk(asked, config, num_clips)
    console.infos(remarks)
    if console.as_json:
        console.json(_to_json(config, clips, forecast, memory, disk))
    else:
        _print(console, asked, config, clips, forecast, memory, disk)


def _schedule(config: PipelineConfig, num_clips: int) -> Any:
    from svdpp.plan.schedule import build_schedule

    clips = range(num_clips)
    if config.draft is not None:
        return config.draft_plan.schedule(clips)
    return build_schedule(config.layout.routes(clips), config.world_size)


def _forecast(config: PipelineConfig, num_clips: int) -> Forecast:
    """The forecast for clips that are made from their first step, at the costs of the layout."""
    from dataclasses import replace

    from svdpp.plan.forecast import replay, summarise
    from svdpp.plan.large_forecast import forecast_layout

    if config.draft is None:
        return forecast_layout(config.layout, num_clips)
    drafted = min(num_clips, _MAX_DRAFTS)
    forecast = summarise(replay(_schedule(config, drafted), config.costs), config.world_size)
    makespan = forecast.makespan + (num_clips - drafted) * forecast.seconds_per_clip
    return replace(forecast, clips=num_clips, makespan=makespan)


def _disk(asked: RunRequest, config: PipelineConfig, num_clips: int) -> dict[str, int]:
    from svdpp.media.disk_space import estimated_bytes, free_bytes

    policy, sampling = asked.policy, config.sampling
    sizes = {"height": sampling.height, "width": sampling.width}
    one = estimated_bytes(policy.format, policy.crf, num_frames=sampling.frames, **sizes)
    return {"needed_bytes": num_clips * one, "free_bytes": free_bytes(policy.folder)}


def _print(
    console: Console,
    asked: RunRequest,
    config: PipelineConfig,
    clips: ClipPlan,
    forecast: Forecast | None,
    memory: Sequence[RankMemory],
    disk: dict[str, int],
) -> None:
    from svdpp.media.disk_space import size

    folder = asked.policy.folder
    names = [metadata["output"] for metadata in clips.metadata]
    for name in names[:_MAX_NAMES]:
        console.result(str(folder / name))
    if len(names) > _MAX_NAMES:
        console.result(f"... and {len(names) - _MAX_NAMES} more")
    if clips.skipped:
        console.result(f"already finished: {counted(len(clips.skipped), 'clip')}")
    console.result()
    sampling = config.sampling
    console.result(
        f"{counted(len(names), 'clip')} to make: {counted(sampling.frames, 'frame')} of "
        f"{sampling.width}x{sampling.height}, "
        f"{counted(sampling.num_inference_steps, 'step')}, {config.model.name} {config.model.dtype}"
    )
    console.result(f"{counted(config.world_size, f'{config.device} rank')}: {config.plan}")
    if forecast is not None:
        costs = config.costs
        console.result(
            f"forecast, by {costs.name or 'the given costs'} on {costs.device or 'one device'}: "
            f"{forecast.makespan:.4g} s, first after {forecast.first_clip:.4g} s"
        )
    else:
        console.result("forecast: none without --costs, which svdpp profile measures")
    console.result(
        f"disk: about {size(disk['needed_bytes'])} in {str(folder)!r}, which has "
        f"{size(disk['free_bytes'])} free"
    )
    console.result()
    rows = [
        (str(each.rank), *(f"{part / 2**30:.2f}" for part in _parts(each).values()))
        for each in memory
    ]
    console.table(("rank", "weights GiB", "work GiB", "process GiB", "peak GiB"), rows)


def _to_json(
    config: PipelineConfig,
    clips: ClipPlan,
    forecast: Forecast | None,
    memory: Sequence[RankMemory],
    disk: dict[str, int],
) -> dict[str, Any]:
    times = None
    if forecast is not None:
        times = {
            "makespan_seconds": forecast.makespan,
            "first_clip_seconds": forecast.first_clip,
            "costs": config.costs.name,
        }
    return {
        "schema_version": 1,
        "clips": [
            {"output": metadata["output"], "input": metadata["input"], "seed": metadata["seed"]}
            for metadata in clips.metadata
        ],
        "finished": [metadata["output"] for metadata in clips.skipped],
        "layout": str(config.plan),
        "world_size": config.world_size,
        "device": config.device,
        "forecast": times,
        "ranks": [{"rank": each.rank, **_parts(each)} for each in memory],
        "disk": disk,
    }


def _parts(memory: RankMemory) -> dict[str, int]:
    return {
        "weight_bytes": memory.weight_bytes,
        "work_bytes": memory.activation_bytes,
        "process_bytes": memory.process_bytes,
        "peak_bytes": memory.total_bytes,
    }
