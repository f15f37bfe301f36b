"""Owns utilisation: the FLOPs of a model's parts over the measured seconds of each rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from svdpp.config import DUMMY_MODEL, ModelConfig, SamplingConfig, sampling_from
from svdpp.diagnostics.device_peaks import peak_tflops
from svdpp.diagnostics.figures import RankFigures, RunFigures
from svdpp.errors import SvdppError


@dataclass(frozen=True, kw_only=True)
class PartFlops:
    """FLOPs of one clip's encode, of one step, and of one clip's decode."""

    encode: int
    step: int
    decode: int


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """How fast one rank computed."""

    rank: int
    tflops: float
    """Achieved TFLOP/s while it computed; waits do not count."""
    mfu: float | None
    """Of its device's published peak, 0 to 1 (model FLOPs utilisation); None if that is unknown."""

    def __str__(self) -> str:
        return f"rank {self.rank} {speed_text(self.tflops, self.mfu)}"


def utilisation(ranks: Iterable[RankFigures], flops: PartFlops, dtype: str) -> list[Utilisation]:
    """The utilisation of each rank that has computed.

    Args:
        ranks: of a run.
        flops: of the model's parts.
        dtype: of the model.
    """
    return [_of_rank(rank, flops, dtype) for rank in ranks if rank.compute]


def _of_rank(rank: RankFigures, flops: PartFlops, dtype: str) -> Utilisation:
    done = (
        rank.encode.count * flops.encode
        + rank.step.count * flops.step
        + rank.decode.count * flops.decode
    )
    return achieved(rank.rank, done, rank.compute, rank.device_name, dtype)


def achieved(rank: int, flops: int, seconds: float, device_name: str, dtype: str) -> Utilisation:
    """The utilisation of a rank that computed `flops` in `seconds`, above 0."""
    tflops = flops / seconds / 1e12
    peak = peak_tflops(device_name, dtype)
    return Utilisation(rank=rank, tflops=tflops, mfu=None if peak is None else tflops / peak)


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The utilisation of a run's ranks."""

    ranks: tuple[Utilisation, ...] = ()
    note: str = ""
    """Why there is none, or no MFU; empty if there is."""

    def __str__(self) -> str:
        speeds = ", ".join(map(str, self.ranks))
        line = f"TFLOP/s while computing (MFU): {speeds}" if speeds else ""
        return "; ".join(filter(None, [line, self.note]))


def speed_text(tflops: float, mfu: float | None) -> str:
    """Such as `412 (42%)`; without the share if MFU is unknown."""
    return f"{tflops:.3g}" if mfu is None else f"{tflops:.3g} ({mfu:.0%})"


def speeds_of(figures: RunFigures | None) -> Speeds:
    """The utilisation of a run's ranks; takes seconds to build the model without weights.

    The dummy model has none.
    """
    if figures is None or not figures.model or figures.model.get("name") == DUMMY_MODEL:
        return Speeds()
    try:
        flops = _counted(ModelConfig(**figures.model), sampling_from(figures.sampling))
    except (SvdppError, TypeError):
        return Speeds(note="no TFLOP/s: the run's model is not here any more")
    except (RuntimeError, ValueError) as error:  # of torch; the figures come after the clips
        return Speeds(note=f"no TFLOP/s: FLOPs cannot be counted: {error}")
    found = tuple(utilisation(figures.ranks, flops, str(figures.model.get("dtype"))))
    return Speeds(ranks=found, note=why_no_mfu(figures.ranks, found))


def why_no_mfu(ranks: Iterable[RankFigures], found: Iterable[Utilisation]) -> str:
    """Which devices have no published peak here; empty if all have one."""
    unknown = {each.rank for each in found if each.mfu is None}
    names = {rank.device_name or rank.device for rank in ranks if rank.rank in unknown}
    return f"no MFU: no published peak is known for {', '.join(sorted(names))}" if names else ""


def count_flops(model: ModelConfig, sampling: SamplingConfig) -> PartFlops:
    """The FLOPs of a model's parts, from its configs and without its weights; takes seconds.

    Args:
        model: not the dummy.
        sampling: resolved.
    """
    from svdpp.models.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(model, weights=False)
    from svdpp.models.memory import estimate  # imports diffusers: seconds

    parts = estimate(checkpoint, model, sampling, device="cpu")
    assert parts.encode is not None
    assert parts.decode is not None
    return PartFlops(encode=parts.encode.flops, step=parts.denoise.flops, decode=parts.decode.flops)


# The rounds of a bench all have the same model and sampling.
_counted = functools.lru_cache(8)(count_flops)
