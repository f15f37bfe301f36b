"""The forecast of diffusers' model offload, a rival of the layouts; svdpp does not run it.

With `enable_model_cpu_offload` the components of a pipeline take turns on the device. Once for each
clip, each moves there when it is first used, and back to host memory before the next one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs
from svdpp.plan.large_forecast import makespan
from svdpp.plan.layout import Layout

# More would be no valid cost.
_MAX_MOVE_SECONDS = 1e8
_NAME = "diffusers' model offload, which svdpp does not run,"


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Data parallel with model offload on every card."""

    layout: Layout
    """Data parallel; the encode of each clip includes the time of its moves."""
    weights_gib: float
    """All weights, which each rank keeps in host memory."""
    move_seconds: float
    """Time of each clip in which the weights move and the device waits."""
    peak_gib: float
    """Peak memory of a card: the largest part with its weights and work."""

    def __str__(self) -> str:
        return "data parallel with diffusers' model offload"

    @property
    def moves(self) -> str:
        """Its cost in words."""
        return f"{self.move_seconds:.4g} s of each clip to move {self.weights_gib:.4g} GiB"

    def shortfall(self, memory_gib: Sequence[float]) -> str:
        """What it needs if some card has less; empty if all have enough or it is unknown."""
        if not memory_gib or self.peak_gib <= min(memory_gib):
            return ""
        return f"needs {self.peak_gib:.4g} GiB on each card"


def forecast_offload(layout: Layout) -> Offload | None:
    """Model offload on the ranks of `layout`; None if its costs lack the rate or the memory."""
    costs = layout.costs
    rate, peak = costs.offload_gib_per_second, _peak_gib(layout)
    if rate is None or peak is None:
        return None
    num_experts = 1 if layout.expert_boundary is None else 2
    weights = (costs.encode_weights_gib or 0.0) + num_experts * (costs.denoise_weights_gib or 0.0)
    if layout.decodes:
        weights += costs.decode_weights_gib or 0.0
    move_seconds = 2 * weights / rate  # to the device and back
    if move_seconds > _MAX_MOVE_SECONDS:
        raise RequestError(
            f"--offload-gib-per-second {rate:g} is too low: the weights of a clip, {weights:.4g} "
            f"GiB, would move for {move_seconds:.4g} s"
        )
    data_parallel = replace(
        layout,
        split="uniform",
        replicas=layout.world_size,
        decoders=1,
        costs=_with_longer_encode(costs, move_seconds),
    )
    return Offload(
        layout=data_parallel, weights_gib=weights, move_seconds=move_seconds, peak_gib=peak
    )


def offload_remark(
    layout: Layout, num_clips: int, seconds: float, memory_gib: Sequence[float]
) -> str:
    """Compares model offload with a layout; empty if it cannot be faster or is of no interest."""
    if layout.costs.offload_gib_per_second is None and (
        layout.expert_boundary is None or layout.replica_size == 1
    ):
        return ""  # data parallel without offload is never slower
    offload = forecast_offload(layout)
    if offload is None:
        return unknown_offload(layout.costs)
    if shortfall := offload.shortfall(memory_gib):
        return f"{_NAME} {shortfall}"
    asked = makespan(offload.layout, num_clips)
    ratio = asked / seconds if seconds else 1.0
    compared = f"{ratio - 1:.1%} longer" if ratio >= 1 else f"{1 - ratio:.1%} less"
    return f"{_NAME} would take {asked:.4g} s, {compared}, with {offload.moves}"


def unknown_offload(costs: Costs) -> str:
    """Why model offload is not compared, and which option gives what is missing."""
    lacks = "svdpp plan --offload-gib-per-second gives its cost"
    if costs.offload_gib_per_second is not None:
        lacks = "the costs do not give its memory, svdpp plan --memory estimates it"
    return f"diffusers' model offload is not compared: {lacks}"


def offload_hint(layout: Layout, num_clips: int, memory_gib: Sequence[float]) -> str:
    """That model offload fits where no layout does, and its time; empty if it does not fit."""
    peak = _peak_gib(layout)
    if peak is None or peak > min(memory_gib):
        return ""
    offload = forecast_offload(layout)
    time = (
        "--offload-gib-per-second gives its time"
        if offload is None
        else f"it would take {makespan(offload.layout, num_clips):.4g} s for all clips"
    )
    return f"{_NAME} needs {peak:.4g} GiB: {time}"


def _peak_gib(layout: Layout) -> float | None:
    """The largest part, with its weights and work; None if the costs lack a value.

    A VAE that encodes a photograph stays on the device until it decodes. It is not counted beside
    the denoiser: it is small (0.5 GB in Wan).
    """
    peaks = []
    for part in ("encode", "denoise", "decode"):
        if part != "decode" or layout.decodes:
            parts = dict.fromkeys(("encode", "denoise", "decode"), False) | {part: True}
            peaks.append(layout.costs.peak_gib(**parts))
    known = [peak for peak in peaks if peak is not None]
    return max(known) if len(known) == len(peaks) else None


def _with_longer_encode(costs: Costs, seconds: float) -> Costs:
    encode = costs.encode_seconds
    if isinstance(encode, tuple):
        return replace(costs, encode_seconds=tuple(each + seconds for each in encode))
    return replace(costs, encode_seconds=encode + seconds)
