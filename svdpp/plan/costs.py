"""`CostModel`: seconds and memory of each kind of work, from JSON or published measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from svdpp.errors import RequestError, pluralize
from svdpp.plan.actions import Action, Kind
from svdpp.plan.roles import Roles

SCHEMA_VERSION = 1

#: One number for all ranks, or a tuple with one for each rank.
PerRank = float | tuple[float, ...]

# Largest allowed values of costs, so that sums over any number of clips stay finite.
_MAX_SECONDS = 1e9
_MAX_OTHER = 1e18
_TEXTS = ("name", "source", "device")
_PER_RANK = ("step_seconds", "encode_seconds", "decode_seconds")
_ABOVE_ZERO = ("step_seconds", "ranks_per_host")


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of each kind of work, and the memory that the work needs, if known.

    The default values use a denoising step as the unit of time: a step takes 1, all other work 0.
    """

    step_seconds: PerRank = 1.0
    """Seconds of a denoising step; a tuple with one number for each rank if devices differ in
    speed."""
    encode_seconds: PerRank = 0.0
    """Seconds of a clip's encode: text and image encoders, VAE and noise."""
    decode_seconds: PerRank = 0.0
    """Seconds of a clip's decode to frames."""
    transfer_seconds: float = 0.0
    """Seconds of a transfer of a clip's packet between two ranks on one host."""
    ranks_per_host: int | None = None
    """Number of ranks on each host; the ranks of a host have consecutive numbers. None: all ranks
    are on one host."""
    inter_host_transfer_seconds: float | None = None
    """Seconds of a transfer of a clip's packet to a rank on another host; None: unknown."""
    encode_weights_gib: float | None = None
    """Memory of the weights that an encode needs, in GiB; None: unknown."""
    denoise_weights_gib: float | None = None
    """Memory of the denoiser's weights in GiB; None: unknown. If the model has two denoisers
    (experts), this is the memory of one of them."""
    decode_weights_gib: float | None = None
    """Memory of the weights that a decode needs, in GiB; None: unknown."""
    encode_work_gib: float | None = None
    """Peak memory of an encode besides the weights, in GiB; None: unknown."""
    denoise_work_gib: float | None = None
    """Peak memory of a denoising step besides the weights, in GiB; None: unknown."""
    decode_work_gib: float | None = None
    """Peak memory of a decode besides the weights, in GiB; None: unknown."""
    name: str = ""
    """Description of the clips that the costs are for, such as a model and a size."""
    source: str = ""
    """Source of the numbers: a publication or a measurement."""
    device: str = ""
    """Device on which the costs were measured."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if fault := _fault(name, value):
                raise RequestError(
                    f"`{name}` {fault}",
                    details={"field": name, "fault": fault},
                )

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host, from 0. Each host has consecutive ranks.

        Args:
            rank: Number of the rank, from 0.
        """
        return 0 if self.ranks_per_host is None else rank // self.ranks_per_host

    def transfer(self, source: int, target: int) -> float:
        """Return the seconds of one transfer of a clip's packet between two ranks.

        Args:
            source: Rank that sends.
            target: Rank that receives, on the same host or another.

        Raises:
            RequestError: The ranks are on different hosts, and the costs have no time for a
                transfer between hosts.
        """
        if self.host_of(source) == self.host_of(target):
            return self.transfer_seconds
        if self.inter_host_transfer_seconds is None:
            raise RequestError(
                "the costs do not give the time of a transfer between hosts "
                f"(rank {source} to rank {target})",
                "use `inter_host_transfer_seconds` SECONDS; svdpp profile on the hosts "
                "measures this time",
                details={"from_rank": source, "to_rank": target},
            )
        return self.inter_host_transfer_seconds

    @property
    def differ_by_rank(self) -> bool:
        """Whether ranks differ in speed, so that a cost is a tuple with a number for each rank."""
        return any(isinstance(getattr(self, name), tuple) for name in _PER_RANK)

    def step_on(self, rank: int, other: int = -1) -> float:
        """Return the seconds of one denoising step on a rank, or on a pair that shares the step.

        A pair takes half of the slower rank's seconds, plus the time in which the ranks exchange
        their predictions. The exchange is counted as the transfer of a packet, although the
        exchange is faster.

        Args:
            rank: Rank that runs the step, or the first rank of a pair.
            other: Second rank of the pair; negative: `rank` runs the step alone.
        """
        if other < 0:
            return _value_on(self.step_seconds, rank)
        return max(self.step_on(rank), self.step_on(other)) / 2 + self.transfer(rank, other)

    def encode_on(self, rank: int) -> float:
        """Return the seconds of one clip's encode on a rank.

        Args:
            rank: Rank that encodes.
        """
        return _value_on(self.encode_seconds, rank)

    def decode_on(self, rank: int) -> float:
        """Return the seconds of the decode of all frames of one clip on a rank.

        Args:
            rank: Rank that decodes.
        """
        return _value_on(self.decode_seconds, rank)

    def action_seconds(self, action: Action, rank: int) -> float:
        """Return the seconds for which an action keeps a rank's device busy; 0 for transfers.

        Args:
            action: Action of any kind.
            rank: Rank that performs the action.
        """
        if action.kind is Kind.DENOISE:
            return (action.end - action.start) * self.step_on(rank, action.peer)
        if action.kind is Kind.ENCODE:
            return self.encode_on(rank)
        return self.decode_on(rank) * action.fraction if action.kind is Kind.DECODE else 0.0

    def peak_gib(self, roles: Roles) -> float | None:
        """Return a rank's peak memory: all weights, plus the largest work memory of a part.

        Work memory is the memory that a part needs besides its weights. The result is an upper
        bound: weights that two parts use count twice, such as those of a VAE that also encodes.

        Args:
            roles: Parts of the model that the rank uses.

        Returns:
            Peak memory in GiB; None if the costs lack a value for a part.
        """
        weights = [getattr(self, f"{part}_weights_gib") for part in roles.part_names]
        work = [getattr(self, f"{part}_work_gib") for part in roles.part_names]
        return None if None in (*weights, *work) else sum(weights) + max(work, default=0.0)

    def scaled(self, pace: float) -> CostModel:
        """Return a scaled copy of the costs for the dummy model, which sleeps for these seconds.

        Transfers cost 0 here, because a run of the dummy model really sends its packets.

        Args:
            pace: Factor for the seconds of encodes, steps and decodes.
        """
        times: dict[str, Any] = {name: _times(getattr(self, name), pace) for name in _PER_RANK}
        return replace(self, **times, transfer_seconds=0.0, inter_host_transfer_seconds=0.0)

    def check_world(self, world_size: int) -> None:
        """Raise a `RequestError` unless the costs can be used with a number of ranks.

        Args:
            world_size: Number of ranks.

        Raises:
            RequestError: The costs are for another number of ranks, or `world_size` is not a
                multiple of `ranks_per_host`.
        """
        per_host = self.ranks_per_host
        if per_host and world_size % per_host:
            raise RequestError(
                f"the number of ranks ({world_size}) is not a multiple of the number of ranks on "
                f"each host ({per_host})",
                f"use `hosts` {-(-world_size // per_host)}x{per_host}, or use another `world_size`",
                details={"world_size": world_size, "ranks_per_host": per_host},
            )
        for name in _PER_RANK:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != world_size:
                raise RequestError(
                    f"{name} has values for {pluralize(len(value), 'rank')}, but the run has "
                    f"{world_size}",
                    f"use `world_size` {len(value)}, or use costs with one number for all ranks",
                    details={"field": name, "values": len(value), "world_size": world_size},
                )

    def to_json(self) -> dict[str, Any]:
        """Return a cost model as the JSON object of a costs file; unknown values are None."""
        return {"schema_version": SCHEMA_VERSION, **vars(self)}

    @staticmethod
    def from_json(content: object, where: str) -> CostModel:
        """Return the cost model in the parsed JSON of a costs file.

        Args:
            content: Parsed JSON value, which should be an object. Only the keys `schema_version`
                and `step_seconds` are required.
            where: Name of the file, for errors.

        Raises:
            RequestError: `content` is not an object, has another schema version, or has an unknown
                key or a wrong value.
        """
        if not isinstance(content, Mapping):
            raise RequestError(
                f"{where}: costs must be a JSON object, got {type(content).__name__}"
            )
        values = dict(content)
        version = values.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise RequestError(
                f"{where}: schema_version must be {SCHEMA_VERSION}, got {version!r}",
                details={"path": where, "schema_version": version, "expected": SCHEMA_VERSION},
            )
        known = [field.name for field in fields(CostModel)]
        if unknown := sorted(values.keys() - set(known)):
            raise RequestError(
                f"{where}: unknown key {unknown[0]!r}",
                f"the keys are {', '.join(known)}",
                details={"path": where, "unknown": unknown},
            )
        if "step_seconds" not in values:
            raise RequestError(f"{where}: step_seconds is missing")
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
            if fault := _fault(name, values[name]):
                raise RequestError(
                    f"{where}: {name} {fault}",
                    details={"path": where, "field": name, "fault": fault},
                )
        return CostModel(**values)


def step_from_pair(seconds: float, transfer: float) -> float:
    """Return the seconds of a step on one rank, computed from a step that two ranks share.

    This function is the inverse of `CostModel.step_on` for a pair. `transfer` counts as at most
    half of `seconds`, because the exchange of predictions can be faster than a packet's transfer.

    Args:
        seconds: Measured seconds of a step on a pair of ranks.
        transfer: Seconds of one transfer of a packet.
    """
    return 2 * max(seconds - transfer, seconds / 2)


def measured_costs(
    seconds: Mapping[str, float], assumed: CostModel, *, in_pairs: bool
) -> CostModel:
    """Return a cost model from the measured mean seconds of each kind of work.

    Args:
        seconds: Mean seconds of "step", `ENCODE`, `DECODE` and "transfer". Only "step" is required;
            a missing transfer counts as 0.
        assumed: Cost model for an encode or a decode that was not measured. The seconds of the
            assumed encode or decode are scaled by the ratio of the measured step to the assumed
            step.
        in_pairs: Whether the measured steps ran on pairs, that is, on two ranks each.
    """
    step, transfer = max(seconds["step"], 1e-9), seconds.get("transfer", 0.0)
    step = step_from_pair(step, transfer) if in_pairs else step
    scale = step / assumed.step_on(0)
    return CostModel(
        step_seconds=step,
        encode_seconds=seconds.get(Kind.ENCODE, scale * assumed.encode_on(0)),
        decode_seconds=seconds.get(Kind.DECODE, scale * assumed.decode_on(0)),
        transfer_seconds=transfer,
    )


class PartMemory(NamedTuple):
    """Memory on a device for one part of a model: encode, denoise or decode."""

    weight_bytes: int
    activation_bytes: int
    """Peak bytes of tensors other than the weights."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory for one part of a model, in bytes: weights plus activations."""
        return self.weight_bytes + self.activation_bytes


class PartFlops(NamedTuple):
    """FLOPs of the parts of a model, as torch counts FLOPs: 2 for each multiply-add."""

    encode: int
    """FLOPs of one clip's encode."""
    step: int
    """FLOPs of one denoising step of one clip, with all evaluations of the denoiser."""
    decode: int
    """FLOPs of the decode of all frames of one clip."""


class MemoryEstimate(NamedTuple):
    """Estimated memory of each part of a model."""

    encode: PartMemory
    """Memory of an encode at the clip's size, without the memory of the original image."""
    denoise: PartMemory
    """Memory of a denoising step. If the model has two denoisers (experts), the weights are those
    of the larger one."""
    decode: PartMemory
    """Memory of a decode in chunks of `decode_chunk_size` frames."""

    def of_rank(self, roles: Roles) -> PartMemory:
        """Return a rank's memory: weights of all its parts, and the largest activations of a part.

        Args:
            roles: Parts of the model that the rank uses.
        """
        parts = [getattr(self, part) for part in roles.part_names]
        activations = (part.activation_bytes for part in parts)
        return PartMemory(sum(part.weight_bytes for part in parts), max(activations, default=0))

    def as_costs(self) -> dict[str, float]:
        """Return the estimate as fields of `CostModel`, such as `encode_weights_gib`, in GiB."""
        return {
            f"{name}_{kind}_gib": size / 2**30
            for name, part in self._asdict().items()
            for kind, size in zip(("weights", "work"), part, strict=True)
        }


def _value_on(value: PerRank, rank: int) -> float:
    return value[rank] if isinstance(value, tuple) else value


def _times(value: PerRank, factor: float) -> PerRank:
    return tuple(each * factor for each in value) if isinstance(value, tuple) else value * factor


def _fault(name: str, value: object) -> str:
    """Return what is wrong with the value of a `CostModel` field; empty if it is valid."""
    if name in _TEXTS:
        return "" if isinstance(value, str) else f"must be a string, got {value!r}"
    if value is None and _MAY_BE_UNKNOWN[name]:
        return ""
    values = value if isinstance(value, tuple) and name in _PER_RANK else (value,)
    faults = (_number_fault(name, each) for each in values)
    return next(
        filter(None, faults), "" if values else "must have a number for each rank, got none"
    )


def _number_fault(name: str, value: object) -> str:
    most = _MAX_SECONDS if name.endswith("_seconds") else _MAX_OTHER
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        return f"must be a number from 0 to {most:g}, got {value!r}"
    if name == "ranks_per_host" and value != int(value):
        return f"must be a whole number, got {value!r}"
    return "must be above 0" if name in _ABOVE_ZERO and value == 0 else ""


#: Former name of `CostModel`, kept until the next version.
Costs = CostModel

_MAY_BE_UNKNOWN = {field.name: field.default is None for field in fields(CostModel)}

_STABILITY = (
    "https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt-1-1-tensorrt, table "
    "'SVD-XT 1.1 (25 frames, 25 steps)': TensorRT, 576x1024; step: UNet x 25 / 25, encode: CLIP + "
    "VAE encoder, decode: VAE decoder; the table does not give transfers, writing or memory"
)


def _published(device: str, unet: float, clip: float, encoder: float, decoder: float) -> CostModel:
    """Return the cost model of a GPU, from its times in a table that Stability AI published.

    Args:
        device: Name of the GPU.
        unet: Milliseconds of 25 calls of the UNet, in total.
        clip: Milliseconds of the CLIP image encoder.
        encoder: Milliseconds of the VAE's encoder.
        decoder: Milliseconds of the VAE's decoder.
    """
    return CostModel(
        step_seconds=unet / 25 / 1000,
        encode_seconds=(clip + encoder) / 1000,
        decode_seconds=decoder / 1000,
        name="SVD-XT 1.1",
        source=_STABILITY,
        device=device,
    )


PRESETS = {
    "svd-xt-a100": _published("A100 80GB SXM", 27_489.88, 53.20, 65.68, 4_544.12),
    "svd-xt-a100-pcie": _published("A100 80GB PCIe", 30_367.73, 105.41, 66.70, 4_663.63),
    "svd-xt-h100-pcie": _published("H100 80GB PCIe", 19_102.98, 91.32, 49.07, 3_382.62),
}
