"""The options of a forecast: clips, hosts, arrivals, memory, and single costs."""

import math
from dataclasses import dataclass, replace
from typing import Any

from svdpp.cli.options.declare import COSTS, LAYOUT, MEMORY, setting, switch
from svdpp.cli.options.inputs import ClipOptions
from svdpp.config.limits import MAX_CLIPS
from svdpp.errors import RequestError
from svdpp.plan.costs import Costs

_CLIPS_PER_RANK = 2
# Enough clips for the start and end of the run to matter little.
_CLIPS_PER_RANK_TO_COMPARE = 16


@dataclass(frozen=True, kw_only=True)
class ForecastOptions(ClipOptions):
    """What to forecast."""

    compare: bool = switch(LAYOUT, "Show every split, auto and data parallel side by side.")
    hosts: str | None = setting(
        LAYOUT,
        "HxG",
        "Hosts and ranks on each, such as 2x4; transfers between hosts take longer.",
        shown="all ranks are on one host",
    )
    arrivals: str | None = setting(
        LAYOUT,
        "RATE",
        "Clips arrive at random at this average rate, such as 2/s, 90/min or 500/h.",
        shown="all clips are present at the start",
    )
    expert_boundary: int | None = setting(
        LAYOUT,
        "N",
        "The model changes its expert after N steps, as Wan 2.2 A14B does. Each rank "
        "then does steps of one expert only, and loads no other.",
        shown="one expert",
    )
    memory: bool = switch(
        MEMORY,
        "Estimate each rank's peak memory from the configuration of --model, without "
        "downloading weights. Takes seconds, since it imports torch.",
    )
    device_memory: str | None = setting(
        MEMORY,
        "GIB|CARDS",
        "Memory of each device, or a list such as 2x79,2x47; --layout auto and --compare "
        "leave out layouts that need more.",
    )

    def num_clips(self, world_size: int) -> int:
        """Clips to plan for."""
        from svdpp.plan.split import MAX_RANKS

        if world_size > MAX_RANKS:
            raise RequestError(f"a plan has at most {MAX_RANKS} ranks, got {world_size}")
        per_rank = _CLIPS_PER_RANK_TO_COMPARE if self.compare else _CLIPS_PER_RANK
        return self.at_least_one(min(per_rank * world_size, MAX_CLIPS))

    def limits(self, world_size: int) -> tuple[float, ...]:
        """Memory of each device in GiB; empty without `--device-memory`."""
        asked = self.device_memory
        if asked is None:
            return ()
        cards = [gib for entry in asked.split(",") for gib in _cards(entry, world_size)]
        if len(cards) == 1:
            return (cards[0],) * world_size
        if len(cards) != world_size:
            raise RequestError(
                f"--device-memory {asked} names {len(cards)} devices, but there are {world_size} "
                "ranks",
                f"use --gpus {len(cards)}, or name {world_size} devices",
            )
        return tuple(cards)


def _cards(entry: str, most: int) -> list[float]:
    """The GiB of each card of an entry such as 79 or 2x79; at most one card more than `most`."""
    count, times, gib = entry.rpartition("x")
    try:
        size = float(gib)
        number = int(count) if times else 1
    except ValueError:
        size = number = 0
    if not (math.isfinite(size) and size > 0 and number > 0):
        raise RequestError(
            f"--device-memory must be a finite number above 0, got {entry!r}",
            "such as --device-memory 79, or 2x79,2x47 for devices that differ",
        )
    return [size] * min(number, most + 1)


def _seconds(help: str) -> Any:
    return setting(COSTS, "SECONDS", help, shown="that of --costs")


@dataclass(frozen=True, kw_only=True)
class SecondsOptions:
    """Costs that replace those of `--costs`; None keeps theirs."""

    step_seconds: float | None = _seconds("Time of one step, above 0.")
    encode_seconds: float | None = _seconds("Time of one clip's encode.")
    decode_seconds: float | None = _seconds("Time of one clip's decode.")
    transfer_seconds: float | None = _seconds("Latency of one transfer from rank to rank.")
    inter_host_transfer_seconds: float | None = _seconds(
        "Latency of one transfer to a rank on another host. A plan over several hosts needs it, "
        "here or in the costs."
    )

    def applied(self, costs: Costs, *, ranks_per_host: int | None) -> Costs:
        """`costs` with the given values in place of theirs, for hosts of `ranks_per_host` ranks."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if ranks_per_host is not None:
            given["ranks_per_host"] = ranks_per_host
        return replace(costs, **given)
