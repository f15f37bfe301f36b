"""The measurement of costs: seconds of each kind of work, on real ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from svdpp.config import PipelineConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics.environment import cpu_model
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import estimate_parts, resolve
from svdpp.driver.supervisor import OpenObserver, no_observer
from svdpp.driver.trace import Placed, StepSpan, Trace, TransferSpan
from svdpp.launch import gpus
from svdpp.launch.world import World
from svdpp.media.inputs import example_requests
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs

_STEPS_PER_RANK = 2
#: GPUs whose step times differ by more than this factor get separate costs.
_SAME_SPEED = 1.1


def profile(
    config: PipelineConfig,
    *,
    repeats: int,
    log: Callable[[str], None],
    open_observer: OpenObserver = no_observer,
    prompt: str | None = None,
) -> Costs:
    """Measures the parts of a run on the devices of `config`, with all ranks working at once.

    CPU ranks share cores and memory bandwidth, so a rank alone would be faster than in a run.
    Memory is estimated from the model's configs.

    Args:
        repeats: measured clips through each rank, after one that warms up.
        prompt: of the clips; None: an example, if the model takes prompts.
    """
    config, checkpoint = resolve(measured_config(config), weights="all")
    pipeline, trace = Pipeline(config), Trace(config.world_size, first_clip=1)
    # Until the first clip reaches the last rank, not all ranks work: these clips come on top.
    num_clips = config.world_size + repeats
    log(f"{num_clips} clips through {config.world_size} ranks for the times")
    requests = example_requests(config, num_clips, prompt=prompt)
    with open_observer("profile", pipeline.schedule(requests)) as progress:
        for observer in (progress, trace):
            pipeline.observe(observer)
        with pipeline:
            pipeline.run(requests)
    source = "measured by svdpp profile"
    costs = median_costs(config, pipeline.world, [trace], source=source)
    log("estimate of the memory of each part")
    memory: dict[str, Any] = estimate_parts(config, checkpoint).as_costs()
    return replace(costs, **memory)


def measured_config(config: PipelineConfig) -> PipelineConfig:
    """`config` with the steps of the measurement: a few for each rank.

    One rank of a model with prompts does more, so that each of two experts has a step.
    """
    shares = max(config.world_size, 2 if isinstance(config.sampling, PromptedSampling) else 1)
    steps = _STEPS_PER_RANK * shares
    return replace(config, sampling=replace(config.sampling, num_inference_steps=steps))


def median_costs(
    config: PipelineConfig,
    world: World | None,
    traces: Sequence[Trace],
    elsewhere: Sequence[Trace] = (),
    *,
    source: str,
) -> Costs:
    """The medians of all clips in `traces`.

    Args:
        world: of the launcher that started the ranks; None if this process did.
        elsewhere: of other layouts, with the steps of ranks that do none in the pipeline; without
            them such a rank counts as fast as the others.
    """
    ranks_per_host = None if world is None else world.ranks_per_host
    host_of = Costs(ranks_per_host=ranks_per_host).host_of
    packets = [packet for trace in traces for packet in trace.received]
    transfers: dict[bool, list[TransferSpan]] = {True: [], False: []}
    for packet in packets:
        transfers[host_of(packet.rank) != host_of(packet.peer)].append(packet)
    by_rank = {**_steps_by_rank(elsewhere), **_steps_by_rank(traces)}
    return Costs(
        step_seconds=_step_costs(config, by_rank, spans_hosts=ranks_per_host is not None),
        encode_seconds=_action_seconds(traces, Kind.ENCODE),
        decode_seconds=_action_seconds(traces, Kind.DECODE),
        transfer_seconds=_median(transfers[False]),
        packet_bytes=float(max((packet.num_bytes for packet in packets), default=0)),
        ranks_per_host=ranks_per_host,
        inter_host_transfer_seconds=_median(transfers[True]) if transfers[True] else None,
        name=_name(config),
        source=source,
        device=_devices(config, world),
    )


def _steps_by_rank(traces: Sequence[Trace]) -> dict[int, float]:
    """The median step of each rank that does any."""
    found: dict[int, list[StepSpan]] = defaultdict(list)
    for step in (step for trace in traces for step in trace.steps):
        found[step.rank].append(step)
    return {rank: _median(steps) for rank, steps in found.items()}


def _action_seconds(traces: Sequence[Trace], kind: Kind) -> float:
    return _median([span for trace in traces for span in trace.spans if span.action.kind is kind])


def _median(spans: Sequence[Placed]) -> float:
    """The median of their seconds; 0 if nothing was measured."""
    return statistics.median([span.end - span.start for span in spans] or [0.0])


def _step_costs(
    config: PipelineConfig, by_rank: dict[int, float], *, spans_hosts: bool
) -> float | tuple[float, ...]:
    """One number, unless GPUs or hosts differ; on one CPU, differences are noise."""
    usual = statistics.median(by_rank.values() or [0.0])
    steps = [by_rank.get(rank, usual) for rank in range(config.world_size)]
    if (config.device == "cuda" or spans_hosts) and max(steps) > _SAME_SPEED * min(steps):
        return tuple(steps)
    return statistics.median(steps)


def _name(config: PipelineConfig) -> str:
    model, sampling = config.model, config.sampling
    if model.is_dummy:
        return f"dummy {'x'.join(map(str, model.dummy_latent.shape))} {model.dtype}"
    size = f"{sampling.frames} frames of {sampling.width}x{sampling.height}"
    if isinstance(sampling, PromptedSampling):
        more = f"from {'an image' if sampling.from_image else 'text'}"
    else:
        more = f"decoded by {sampling.decode_chunk_size}"
    return f"{model.name} {model.dtype}, {size}, {more}"


def _devices(config: PipelineConfig, world: World | None) -> str:
    size = config.world_size
    if world is not None and world.spans_hosts:
        own = cpu_model() if config.device == "cpu" else gpus.visible_gpus()[0].name
        return f"{size} ranks on {world.num_hosts} hosts, rank 0 on: {own}"
    if config.device == "cpu":
        threads = f"{config.num_threads} thread{'s' * (config.num_threads > 1)}"
        return f"{size} ranks x {threads} on one {cpu_model()}"
    visible = gpus.visible_gpus()
    index = int(config.device.partition(":")[2] or 0)
    used = visible[:size] if config.device == "cuda" else visible[index : index + 1]
    names = [gpu.name for gpu in used]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
