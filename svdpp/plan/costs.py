"""Owns costs: the seconds and memory of each kind of work, and the `costs.json` that holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from svdpp.errors import InputError, RequestError
from svdpp.plan.actions import Action, Kind
from svdpp.plan.small_file import is_version, read_small_file

SCHEMA_VERSION = 1

#: One number for all ranks, or one for each, by rank.
PerRank = float | tuple[float, ...]

# So that sums over any number of clips stay finite.
_MAX_SECONDS = 1e9
_MAX_OTHER = 1e18
_TEXTS = ("name", "source", "device")
_PER_RANK = ("step_seconds", "encode_seconds", "decode_seconds")
_ABOVE_ZERO = (
    "step_seconds",
    "transfer_bytes_per_second",
    "inter_host_bytes_per_second",
    "ranks_per_host",
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each kind of work takes: seconds always, memory where it is known.

    The default is the unit of a plan without measurements: one step takes 1, everything else 0.

    Raises:
        RequestError: a value that is no finite number of 0 or more, named by its option.
    """

    step_seconds: PerRank = 1.0
    """One denoising step; one number for each rank where devices differ in speed."""
    encode_seconds: PerRank = 0.0
    """One clip's encode: CLIP, VAE, noise. For ranks of different speed, as `step_seconds`."""
    decode_seconds: PerRank = 0.0
    """One clip's decode to frames. For ranks of different speed, as `step_seconds`."""
    transfer_seconds: float = 0.0
    """Latency of one hand-over, whatever its size."""
    transfer_bytes_per_second: float | None = None
    """Bandwidth between neighbours; None: the size of a packet does not count."""
    packet_bytes: float = 0.0
    """Size of what one clip hands over."""
    ranks_per_host: int | None = None
    """Ranks on each host, in their order; None: all are on one."""
    inter_host_transfer_seconds: float | None = None
    """As `transfer_seconds`, to a rank on another host; None: not known."""
    inter_host_bytes_per_second: float | None = None
    """As `transfer_bytes_per_second`, to a rank on another host."""
    write_seconds: float = 0.0
    """One clip's file. Written beneath the next clip's work, so no forecast counts it."""
    encode_weights_gib: float | None = None
    denoise_weights_gib: float | None = None
    decode_weights_gib: float | None = None
    """Weights of the part, GiB; a rank holds those of the parts that it ever uses."""
    encode_work_gib: float | None = None
    denoise_work_gib: float | None = None
    decode_work_gib: float | None = None
    """Peak of what the part needs above all weights while it works, GiB."""
    name: str = ""
    """What these costs are of, such as a model."""
    source: str = ""
    """Where they come from: a publication, or how they were measured."""
    device: str = ""
    """What they were measured on."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if fault := _fault(name, value):
                raise RequestError(f"--{name.replace('_', '-')} {fault}")

    @property
    def local_transfer_seconds(self) -> float:
        """One transfer: its latency, and its bytes at the bandwidth."""
        if self.transfer_bytes_per_second is None:
            return self.transfer_seconds
        return self.transfer_seconds + self.packet_bytes / self.transfer_bytes_per_second

    def host_of(self, rank: int) -> int:
        """The host that `rank` is on, counted from 0."""
        return 0 if self.ranks_per_host is None else rank // self.ranks_per_host

    def transfer(self, source: int, target: int) -> float:
        """Seconds of one hand-over from rank `source` to rank `target`.

        Raises:
            RequestError: they are on two hosts, and nothing tells what that takes.
        """
        if self.host_of(source) == self.host_of(target):
            return self.local_transfer_seconds
        if self.inter_host_transfer_seconds is None:
            raise RequestError(
                f"the costs do not tell what a hand-over between hosts takes (rank {source} to "
                f"rank {target})",
                "give --inter-host-transfer-seconds SECONDS, or inter_host_transfer_seconds in the "
                "costs' "
                "file; svdpp profile writes it where torchrun has started it on several hosts",
            )
        bandwidth = self.inter_host_bytes_per_second
        size = 0.0 if bandwidth is None else self.packet_bytes / bandwidth
        return self.inter_host_transfer_seconds + size

    def knows_transfer(self, source: int, target: int) -> bool:
        """Whether `transfer` knows what that takes."""
        return self.inter_host_transfer_seconds is not None or self.host_of(source) == self.host_of(
            target
        )

    @property
    def differ_by_rank(self) -> bool:
        """Whether some work is given rank by rank."""
        return any(isinstance(getattr(self, name), tuple) for name in _PER_RANK)

    def step_on(self, rank: int) -> float:
        """Seconds of one step on `rank`."""
        return _on(self.step_seconds, rank)

    def encode_on(self, rank: int) -> float:
        """Seconds of one clip's encode on `rank`."""
        return _on(self.encode_seconds, rank)

    def decode_on(self, rank: int) -> float:
        """Seconds of one clip's decode on `rank`."""
        return _on(self.decode_seconds, rank)

    def of(self, action: Action, rank: int) -> float:
        """Seconds for which `action` keeps the device of `rank` busy."""
        if action.kind is Kind.DENOISE:
            return (action.end - action.start) * self.step_on(rank)
        if action.kind is Kind.ENCODE:
            return self.encode_on(rank)
        return self.decode_on(rank) if action.kind is Kind.DECODE else 0.0

    def peak_gib(self, *, encode: bool, denoise: bool, decode: bool) -> float | None:
        """Peak memory of a rank that does these parts, GiB; None where not all of it is known.

        The weights of all its parts, and the work of the one that needs most. What two parts share
        (encode and decode use one VAE) is counted twice, so it is an upper bound.
        """
        asked = {"encode": encode, "denoise": denoise, "decode": decode}
        parts = [part for part, used in asked.items() if used]
        weights = [getattr(self, f"{part}_weights_gib") for part in parts]
        work = [getattr(self, f"{part}_work_gib") for part in parts]
        if None in weights or None in work:
            return None
        return float(sum(weights) + max(work, default=0.0))

    def scaled(self, pace: float) -> Costs:
        """Device work at `pace` times its seconds; transfers and files are real ones."""
        return replace(
            self,
            step_seconds=_times(self.step_seconds, pace),
            encode_seconds=_times(self.encode_seconds, pace),
            decode_seconds=_times(self.decode_seconds, pace),
            transfer_seconds=0.0,
            transfer_bytes_per_second=None,
            inter_host_transfer_seconds=0.0,
            inter_host_bytes_per_second=None,
            write_seconds=0.0,
        )

    def check_world(self, world_size: int) -> None:
        """Refuses costs that are given rank by rank for another number of ranks.

        Raises:
            RequestError: naming both numbers.
        """
        if self.ranks_per_host and world_size % self.ranks_per_host:
            raise RequestError(
                f"{world_size} ranks are not hosts of {self.ranks_per_host} ranks each",
                f"use --hosts {-(-world_size // self.ranks_per_host)}x{self.ranks_per_host}, or "
                "another --world",
            )
        for name in _PER_RANK:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != world_size:
                raise RequestError(
                    f"{name} is given for {len(value)} ranks, but there are {world_size}",
                    f"use --world {len(value)}, or costs with one number for all ranks",
                )

    def to_json(self) -> dict[str, Any]:
        """The content of `costs.json`: every field, None where nothing is known."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {name: list(v) for name, v in values.items() if isinstance(v, tuple)}
        return {"schema_version": SCHEMA_VERSION, **values, **lists}

    @staticmethod
    def from_json(content: object, where: str) -> Costs:
        """The costs that `to_json` wrote. `step_seconds` must be there; no other key need be.

        Args:
            content: as JSON was parsed.
            where: the file's name, for messages.

        Raises:
            RequestError: naming the key that is unknown, missing or no such number.
        """
        if not isinstance(content, Mapping):
            raise RequestError(f"{where}: costs are a JSON object, not {type(content).__name__}")
        values = dict(content)
        version = values.pop("schema_version", None)
        if not is_version(version, SCHEMA_VERSION):
            raise RequestError(f"{where}: schema_version must be {SCHEMA_VERSION}, got {version!r}")
        known = [field.name for field in fields(Costs)]
        if unknown := sorted(values.keys() - set(known)):
            raise RequestError(f"{where}: unknown key {unknown[0]!r}", f"known: {', '.join(known)}")
        if "step_seconds" not in values:
            raise RequestError(f"{where}: step_seconds is missing")
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
            if fault := _fault(name, values[name]):
                raise RequestError(f"{where}: {name} {fault}")
        return Costs(**values)

    @staticmethod
    def load(path: str | Path) -> Costs:
        """The costs in a `costs.json`.

        Raises:
            InputError: the file cannot be read, or is no JSON.
            RequestError: naming the key that is unknown, missing or no such number.
        """
        try:
            content = json.loads(read_small_file(Path(path), "costs"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"costs {str(path)!r} is no JSON: {error}") from error
        return Costs.from_json(content, str(path))


def _on(value: PerRank, rank: int) -> float:
    return value[rank] if isinstance(value, tuple) else value


def _times(value: PerRank, factor: float) -> PerRank:
    return tuple(each * factor for each in value) if isinstance(value, tuple) else value * factor


def _fault(name: str, value: object) -> str:
    """What is wrong with a field's value; empty where nothing is."""
    if name in _TEXTS:
        return "" if isinstance(value, str) else f"must be a text, got {value!r}"
    if value is None and _MAY_BE_UNKNOWN[name]:
        return ""
    values = value if isinstance(value, tuple) and name in _PER_RANK else (value,)
    if not values:
        return "must have a number for each rank, got none"
    return next(filter(None, (_number_fault(name, each) for each in values)), "")


def _number_fault(name: str, value: object) -> str:
    number = _as_float(value)
    if name == "ranks_per_host" and not number.is_integer():
        return f"must be a whole number, got {value!r}"
    if not (math.isfinite(number) and number >= 0):
        return f"must be a finite number, 0 or more, got {value!r}"
    limit = _MAX_SECONDS if name.endswith("_seconds") else _MAX_OTHER
    if number > limit:
        return f"must be {limit:g} or less, got {value}"
    return "must be above 0" if name in _ABOVE_ZERO and number == 0 else ""


def _as_float(value: object) -> float:
    """`value` as a number; NaN where it is none, infinite where it is beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


_MAY_BE_UNKNOWN = {field.name: field.default is None for field in fields(Costs)}
