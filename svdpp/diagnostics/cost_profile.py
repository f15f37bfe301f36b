"""The measurement of costs: seconds and memory of each kind of work, on real ranks."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from svdpp.config import ClipRequest, OutputConfig, PipelineConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics import rank_probe
from svdpp.diagnostics.environment import cpu_model
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve
from svdpp.driver.supervisor import OpenObserver, no_observer
from svdpp.driver.trace import Trace, TransferSpan
from svdpp.launch import gpus
from svdpp.launch.world import World
from svdpp.media import image as photos
from svdpp.media import video
from svdpp.media.examples import example_photos, example_requests
from svdpp.models import memory as model_memory
from svdpp.models.base import Frames
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Span

_GIB = 2**30
_STEPS_PER_RANK = 2
#: GPUs whose step times differ by more than this factor get separate costs.
_SAME_SPEED = 1.1


@dataclass
class Profile:
    """The measurements, and the costs computed from them.

    Args:
        config: resolved.
        world: of the launcher that started the ranks; None if this process did.
    """

    config: PipelineConfig
    world: World | None = None
    step_seconds: list[float] = field(default_factory=list)
    """The median of each rank, by rank."""
    expert_step_seconds: tuple[float, ...] = ()
    """The median of each expert, for a model with two."""
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    write_seconds: float = 0.0
    packet_bytes: int = 0
    transfers: list[rank_probe.LinkSpeed] = field(default_factory=list)
    transfer_seconds: float = 0.0
    """Of a whole packet, in the run itself; counts only if `transfers` were not measured."""
    inter_host_transfer_seconds: float | None = None
    weight_bytes: dict[str, int] = field(default_factory=dict)
    """By part."""
    work_bytes: dict[str, int] = field(default_factory=dict)
    """By part: the peak above its weights."""
    offload_gib_per_second: float | None = None
    """Of weights, between host memory and device; None on the CPU."""

    @property
    def ranks_per_host(self) -> int | None:
        """See `World.ranks_per_host`."""
        return None if self.world is None else self.world.ranks_per_host

    def set_times(self, trace: Trace) -> None:
        """Sets all times to the medians of the clips in `trace`, without the first one."""
        steps = [step for step in trace.steps if step.clip > 0]
        self.step_seconds = [
            median([step.end - step.start for step in steps if step.rank == rank])
            for rank in range(trace.world_size)
        ]
        if (boundary := self.config.expert_boundary) is not None:
            self.expert_step_seconds = tuple(
                median([step.end - step.start for step in steps if (step.step >= boundary) is late])
                for late in (False, True)
            )
        self.set_actions(span for span in trace.spans if span.action.clip > 0)
        received = (packet for packet in trace.transfers if packet.direction == "recv")
        self.set_packets([packet for packet in received if packet.clip > 0])

    def set_actions(self, spans: Iterable[Span]) -> None:
        """Sets the times of encode and decode to the medians of `spans`."""
        seconds: dict[Kind, list[float]] = defaultdict(list)
        for span in spans:
            seconds[span.action.kind].append(span.end - span.start)
        self.encode_seconds = median(seconds[Kind.ENCODE])
        self.decode_seconds = median(seconds[Kind.DECODE])

    def set_packets(self, packets: Sequence[TransferSpan]) -> None:
        """Sets size and times of transfers to those of `packets`, measured at their receivers."""
        self.packet_bytes = max((packet.num_bytes for packet in packets), default=0)
        host_of = Costs(ranks_per_host=self.ranks_per_host).host_of
        seconds: dict[bool, list[float]] = defaultdict(list)
        for packet in packets:
            crosses_hosts = host_of(packet.rank) != host_of(packet.peer)
            seconds[crosses_hosts].append(packet.end - packet.start)
        self.transfer_seconds = median(seconds[False])
        self.inter_host_transfer_seconds = median(seconds[True]) if seconds[True] else None

    def costs(self, command: str) -> Costs:
        """The costs for a plan.

        Args:
            command: what the user typed, to be recorded as the source.
        """
        slowest = max(self.transfers, key=lambda transfer: transfer.latency_seconds, default=None)
        memory = {
            **{f"{part}_weights_gib": size / _GIB for part, size in self.weight_bytes.items()},
            **{f"{part}_work_gib": size / _GIB for part, size in self.work_bytes.items()},
        }
        return Costs(
            step_seconds=self._step_costs(),
            encode_seconds=self.encode_seconds,
            decode_seconds=self.decode_seconds,
            write_seconds=self.write_seconds,
            transfer_seconds=slowest.latency_seconds if slowest else self.transfer_seconds,
            transfer_bytes_per_second=min(
                (transfer.bytes_per_second for transfer in self.transfers), default=None
            ),
            packet_bytes=float(self.packet_bytes),
            ranks_per_host=self.ranks_per_host,
            inter_host_transfer_seconds=self.inter_host_transfer_seconds,
            offload_gib_per_second=self.offload_gib_per_second,
            name=self._name(),
            source=f"measured by: {command}",
            device=self.device,
            **memory,
        )

    @property
    def device(self) -> str:
        """The devices of the measurement, in words."""
        world_size, threads = self.config.world_size, self.config.num_threads
        if (world := self.world) is not None and world.spans_hosts:
            own = cpu_model() if self.config.device == "cpu" else gpus.visible_gpus()[0].name
            return f"{world_size} ranks on {world.num_hosts} hosts, rank 0 on: {own}"
        if self.config.device == "cpu":
            return f"{world_size} ranks x {threads} threads on one {cpu_model()}"
        visible = gpus.visible_gpus()
        index = int(self.config.device.partition(":")[2] or 0)
        used = visible[:world_size] if self.config.device == "cuda" else visible[index : index + 1]
        names = [gpu.name for gpu in used]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))

    def _step_costs(self) -> float | tuple[float, ...]:
        """One number, unless GPUs or hosts differ; on one CPU, differences are noise."""
        differ = max(self.step_seconds) > _SAME_SPEED * min(self.step_seconds)
        own_devices = self.config.device == "cuda" or self.ranks_per_host is not None
        if own_devices and differ:
            return tuple(self.step_seconds)
        return statistics.median(self.step_seconds)

    def _name(self) -> str:
        model, sampling = self.config.model, self.config.sampling
        if model.is_dummy:
            return f"dummy {'x'.join(map(str, model.dummy_latent.shape))} {model.dtype}"
        size = f"{sampling.frames} frames of {sampling.width}x{sampling.height}"
        if isinstance(sampling, PromptedSampling):
            more = f"from {'a photograph' if sampling.from_image else 'text'}"
        else:
            more = f"decoded by {sampling.decode_chunk_size}"
        return f"{model.name} {model.dtype}, {size}, {more}"


def profile(
    config: PipelineConfig,
    *,
    repeats: int,
    log: Callable[[str], None],
    open_observer: OpenObserver = no_observer,
    prompt: str | None = None,
) -> Profile:
    """Measures the parts of a run on the devices of `config`, with all ranks working at once.

    CPU ranks share cores and memory bandwidth, so a rank alone would be faster than in a run.
    Memory and transfers are measured separately, one after the other.

    Args:
        config: of the run; its number of steps does not matter, and it need not be resolved.
        repeats: measured clips through each rank, after one that warms up.
        log: takes a line before each measurement.
        open_observer: observes the measured clips.
        prompt: of the clips; None: an example, if the model takes prompts.
    """
    config, checkpoint = resolve(measured_config(config), weights="all")
    pipeline = Pipeline(config)
    result = Profile(config, pipeline.world)
    # Until the first clip reaches the last rank, not all ranks work: these clips come on top.
    num_clips = config.world_size + repeats
    log(f"{num_clips} clips through {config.world_size} ranks for the times")
    requests = example_requests(config, num_clips, prompt=prompt)
    _measure_times(result, pipeline, requests, open_observer)
    if config.decodes:
        _measure_write(result, repeats)
    if result.world is None:  # launched ranks have measured the packets of the run itself
        log("packets between neighbours")
        result.transfers = rank_probe.measure_transfers(config)
        if config.device != "cpu":
            log("weights to the devices and back")
            result.offload_gib_per_second = rank_probe.measure_offload(config)
    log("memory of each part")
    _measure_memory(result, checkpoint)
    return result


def measured_config(config: PipelineConfig) -> PipelineConfig:
    """`config` with the steps of the measurement: a few for each rank.

    One rank of a model with prompts does more, so that each of two experts has a step.
    """
    shares = max(config.world_size, 2 if isinstance(config.sampling, PromptedSampling) else 1)
    steps = _STEPS_PER_RANK * shares
    return replace(config, sampling=replace(config.sampling, num_inference_steps=steps))


def _measure_times(
    result: Profile,
    pipeline: Pipeline,
    requests: list[ClipRequest],
    open_observer: OpenObserver,
) -> None:
    trace = Trace(result.config.world_size)
    pipeline.observe(trace.add)
    with open_observer("profile", pipeline.schedule(requests)) as progress:
        pipeline.observe(progress)
        with pipeline:
            pipeline.run(requests)
    result.set_times(trace)


def _measure_write(result: Profile, repeats: int) -> None:
    frames, fps, seconds = _moving_photo(result.config), result.config.sampling.fps, []
    with tempfile.TemporaryDirectory(prefix="svdpp-profile-") as folder:
        output = OutputConfig(path=str(Path(folder) / "clip.mp4"))
        for _ in range(repeats + 1):
            begun = time.monotonic()
            video.write_clip(frames, output, fps=fps, metadata={})
            seconds.append(time.monotonic() - begun)
    result.write_seconds = median(seconds[1:])


def _moving_photo(config: PipelineConfig) -> Frames:
    """A photograph that moves to the right, which is about as hard to encode as a clip."""
    sampling = config.sampling
    photo, _ = photos.read_photo(example_photos()[0])
    fitted = photos.fit_photo(photo, sampling.width, sampling.height, "crop")
    still = np.asarray(fitted.resize((sampling.width, sampling.height)))
    return np.stack([np.roll(still, frame, axis=1) for frame in range(sampling.frames)])


def _measure_memory(result: Profile, checkpoint: Checkpoint | None) -> None:
    """Takes the weights from the model's configs, and measures the work on rank 0's device."""
    config = result.config
    alone = replace(
        config, world_size=1, device="cuda:0" if config.device == "cuda" else config.device
    )
    estimate = model_memory.estimate(
        checkpoint,
        config.model,
        config.sampling,
        device=config.device,
        num_threads=config.num_threads,
    )
    parts = {"encode": estimate.encode, "denoise": estimate.denoise, "decode": estimate.decode}
    for part, memory in parts.items():
        if memory is not None:
            result.weight_bytes[part] = memory.weight_bytes
            result.work_bytes[part] = rank_probe.measure_work(alone, checkpoint, part)


def median(values: list[float]) -> float:
    """The median of seconds; 0 if nothing was measured."""
    return statistics.median(values) if values else 0.0
