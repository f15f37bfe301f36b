"""Owns the proof: pipelined against sequential, hop by hop, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.distributed import scratch
from svdpp.errors import RequestError
from svdpp.media import video
from svdpp.media.distance import Distance, distance
from svdpp.models.interface import Frames
from svdpp.plan.actions import Kind
from svdpp.plan.draft import Wave
from svdpp.runtime.evidence import Evidence, tensor_sha256
from svdpp.runtime.faults import PlantedFault
from svdpp.runtime.pipeline import Pipeline
from svdpp.runtime.reference import run_reference
from svdpp.runtime.supervisor import Observer

_PIPELINED, _SEQUENTIAL, _SETTINGS = "pipelined", "sequential", "settings.json"
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of the pipelined result with the sequential one.

    Args:
        clip: index of the clip.
        what: `latent` at a hand-over, `final_latent`, or `frames`.
        step: number of steps done.
        rank: the one whose work it is.
        equal: bitwise, or within the tolerance where one was given.
        bitwise: every bit the same.
        max_abs_diff: largest difference; infinite where one side is not a number.
        max_ulp: largest distance, in numbers of the dtype; for frames, in 8-bit levels.
        first_index: where they first differ, in row-major order of the tensor; None where nowhere.
        sha256: of the pipelined side.
    """

    clip: int
    what: Literal["latent", "final_latent", "frames"]
    step: int
    rank: int
    equal: bool
    bitwise: bool
    max_abs_diff: float
    max_ulp: int
    first_index: tuple[int, ...] | None
    sha256: str

    def __str__(self) -> str:
        """Where and by how much the two sides differ, in words."""
        what = {
            "latent": f"the latent after step {self.step - 1}",
            "final_latent": "the final latent",
            "frames": "the frames",
        }[self.what]
        return (
            f"clip {self.clip}, {what}, done by rank {self.rank}: first at index "
            f"{list(self.first_index or ())}, max difference {self.max_abs_diff:.3g}, "
            f"{self.max_ulp} {'levels' if self.what == 'frames' else 'ULP'}"
        )


@dataclass(frozen=True, kw_only=True)
class DraftResult:
    """How far one rank's result of a draft is from the sequential one.

    Args:
        clip: index of the clip.
        rank: whose result; never rank 0, whose result has to be equal.
        start: the step at which the rank started.
        rounds: until it was done.
        latent_max_abs_diff: largest difference of the final latents.
        frames: of the frames; None where there are none.
    """

    clip: int
    rank: int
    start: int
    rounds: int
    latent_max_abs_diff: float
    frames: Distance | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {**vars(self), "frames": None}
        return values if self.frames is None else {**values, **self.frames.to_json()}


@dataclass(frozen=True)
class Verdict:
    """All checks, in the order in which a clip meets them.

    Args:
        checks: at least one.
        drafts: of a draft, the other ranks' results: no checks, since they need not be equal.
    """

    checks: tuple[Check, ...]
    drafts: tuple[DraftResult, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every check holds."""
        return all(check.equal for check in self.checks)

    @property
    def bitwise(self) -> bool:
        """Whether every bit is the same."""
        return all(check.bitwise for check in self.checks)

    @property
    def max_abs_diff(self) -> float:
        """The largest difference of any latent or frame."""
        return max(check.max_abs_diff for check in self.checks)

    @property
    def first_difference(self) -> Check | None:
        """The first check that does not hold: by clip, then in the order of the steps."""
        return next((check for check in self.checks if not check.equal), None)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        return {
            "schema_version": 1,
            "equal": self.equal,
            "bitwise": self.bitwise,
            "max_abs_diff": self.max_abs_diff,
            "checks": [asdict(check) for check in self.checks],
            **({"drafts": [each.to_json() for each in self.drafts]} if self.drafts else {}),
        }


def verify(
    config: PipelineConfig, requests: Sequence[ClipRequest], *, tolerance: float = 0.0
) -> Verdict:
    """Runs `requests` through the ranks, then sequentially, and compares all hand-overs.

    Args:
        config: of the pipelined run; the reference takes model, knobs and threads from it.
        requests: outputs in them are not written.
        tolerance: largest difference that counts as equal; 0 asks for equal bits.

    Raises:
        SvdppError: one of the two sides could not be run.
    """
    with scratch.folder("svdpp-verify-") as folder:
        run_pipelined(config, requests, folder)
        run_sequential(config, requests, folder)
        return compare(config, len(requests), folder, tolerance=tolerance)


def run_pipelined(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
    *,
    fault: PlantedFault | None = None,
    observers: Sequence[Observer] = (),
) -> None:
    """Runs `requests` through the ranks and keeps every hand-over under `folder`.

    Raises:
        SvdppError: the ranks could not run them.
    """
    kept = new_side(folder / _PIPELINED, config)
    pipeline = Pipeline(config, evidence_folder=str(kept), fault=fault)
    for observer in observers:
        pipeline.observe(observer)
    with pipeline:
        pipeline.run(requests)


def run_sequential(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
    *,
    observers: Sequence[Observer] = (),
) -> None:
    """Runs `requests` through the oracle and keeps the same latents under `folder`.

    Raises:
        SvdppError: the oracle could not run them.
    """
    kept = new_side(folder / _SEQUENTIAL, config)
    steps = {end for clip in range(len(requests)) for _, end in _parts(config, clip)}
    run_reference(config, requests, steps=steps, evidence_folder=kept, observers=observers)


def compare(
    config: PipelineConfig, num_clips: int, folder: Path, *, tolerance: float = 0.0
) -> Verdict:
    """Compares what `run_pipelined` and `run_sequential` kept under `folder`.

    Raises:
        RequestError: the two were computed under settings that give other bits by themselves, which
            is no difference for a tolerance to pass.
    """
    _check_settings(folder)
    sides, clips = both_sides(folder), range(num_clips)
    checks = _compare_all(config, clips, *sides, tolerance)
    drafts = () if config.draft is None else _compare_drafts(config.wave, clips, *sides)
    return Verdict(tuple(checks), tuple(drafts))


def both_sides(folder: Path) -> tuple[Evidence, Evidence]:
    """What `run_pipelined` and `run_sequential` kept under `folder`."""
    return Evidence(folder / _PIPELINED), Evidence(folder / _SEQUENTIAL)


def recompute(
    config: PipelineConfig, request: ClipRequest, *, observers: Sequence[Observer] = ()
) -> dict[str, Any]:
    """The hashes that one clip has when it is computed sequentially.

    Raises:
        SvdppError: the oracle could not be run.
    """
    with scratch.folder("svdpp-verify-") as folder:
        return run_reference(
            config, [request], steps=(), evidence_folder=folder, observers=observers
        )[0]


def new_side(folder: Path, config: PipelineConfig) -> Path:
    """A folder for one side of a comparison, with the settings that its bits depend on."""
    folder.mkdir()
    settings = {
        "CPU threads": config.num_threads,
        "device": config.device.partition(":")[0],
        "dtype": config.model.dtype,
    }
    (folder / _SETTINGS).write_text(json.dumps(settings))
    return folder


def _check_settings(folder: Path) -> None:
    ours, theirs = (
        json.loads((folder / side / _SETTINGS).read_text()) for side in (_PIPELINED, _SEQUENTIAL)
    )
    for name, value in ours.items():
        if value != theirs[name]:
            raise RequestError(
                f"the ranks computed with {name} {value}, the reference with {theirs[name]}: sums "
                "are rounded in another order, so their bits cannot agree",
                "give both the same",
            )


def _compare_all(
    config: PipelineConfig,
    clips: Iterable[int],
    ours: Evidence,
    theirs: Evidence,
    tolerance: float,
) -> list[Check]:
    num_steps = config.sampling.num_inference_steps
    checks = []
    for clip in clips:
        for rank, end in _parts(config, clip):
            checks.append(
                compare_latents(
                    ours.latent(clip, end),
                    theirs.latent(clip, end),
                    clip=clip,
                    step=end,
                    rank=rank,
                    final=end == num_steps,
                    tolerance=tolerance,
                )
            )
        if config.decodes:
            last = 0 if config.draft else config.layout.route(clip).ranges[-1].rank
            frames = our_frames(config, ours, clip), theirs.frames(clip)
            checks.append(
                compare_frames(*frames, clip=clip, step=num_steps, rank=last, tolerance=tolerance)
            )
    return checks


def our_frames(config: PipelineConfig, ours: Evidence, clip: int) -> Frames:
    """The frames that the ranks made of `clip`; of a draft, those of the exact path."""
    return ours.frames(clip, walker=None if config.draft is None else 0)


def _parts(config: PipelineConfig, clip: int) -> list[tuple[int, int]]:
    """(rank, steps done) wherever a stretch of the exact path ends."""
    if config.draft is not None:
        exact = config.wave.schedule([clip])[0]
        return [(0, action.end) for action in exact if action.kind is Kind.DENOISE]
    ranges = config.layout.route(clip).ranges
    return [(part.rank, part.end) for part in ranges if part.num_steps]


def _compare_drafts(
    wave: Wave, clips: Iterable[int], ours: Evidence, theirs: Evidence
) -> Iterator[DraftResult]:
    """The ranks' results in the order in which they come, the fastest first."""
    num_steps = wave.num_steps
    for clip in clips:
        exact = theirs.latent(clip, num_steps)
        for rank in range(wave.world_size - 1, 0, -1):
            latent = ours.latent(clip, num_steps, walker=rank)
            frames = None
            if wave.decodes:
                frames = distance(ours.frames(clip, walker=rank), theirs.frames(clip))
            yield DraftResult(
                clip=clip,
                rank=rank,
                start=wave.starts[rank],
                rounds=wave.rounds(rank),
                latent_max_abs_diff=float((latent.double() - exact.double()).abs().max()),
                frames=frames,
            )


def compare_latents(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    *,
    clip: int,
    step: int,
    rank: int,
    final: bool,
    tolerance: float = 0.0,
) -> Check:
    """Compares two latents of one shape and dtype.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{ours.dtype} {ours.shape} against {theirs.dtype} {theirs.shape}")
    differs = _bits(ours) != _bits(theirs)
    bitwise = not bool(differs.any())
    # NaN against a number, or infinity against itself, has no difference to measure.
    difference = (ours.double() - theirs.double()).abs()
    difference = torch.where(differs, difference.nan_to_num(nan=torch.inf), 0.0)
    max_abs_diff = float(difference.max())
    return Check(
        clip=clip,
        what="final_latent" if final else "latent",
        step=step,
        rank=rank,
        equal=bitwise or 0 < tolerance >= max_abs_diff,
        bitwise=bitwise,
        max_abs_diff=max_abs_diff,
        max_ulp=int((_ordered(ours) - _ordered(theirs)).abs().max()),
        first_index=None if bitwise else tuple(int(i) for i in differs.nonzero()[0]),
        sha256=tensor_sha256(ours),
    )


def compare_frames(
    ours: Frames, theirs: Frames, *, clip: int, step: int, rank: int, tolerance: float = 0.0
) -> Check:
    """Compares two clips' frames (F, H, W, 3); a tolerance is of colours from 0 to 1.

    Raises:
        ValueError: shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"frames {ours.shape} against {theirs.shape}")
    difference = np.abs(ours.astype(np.int16) - theirs.astype(np.int16))
    largest = int(difference.max())
    return Check(
        clip=clip,
        what="frames",
        step=step,
        rank=rank,
        equal=largest / 255 <= tolerance,
        bitwise=largest == 0,
        max_abs_diff=largest / 255,
        max_ulp=largest,
        first_index=tuple(int(i) for i in np.argwhere(difference)[0]) if largest else None,
        sha256=video.frames_sha256(ours),
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers; distinguishes -0 from 0 and one NaN from another."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floating-point numbers, so that differences are ULPs.

    Bruce Dawson, "Comparing Floating Point Numbers": negative numbers count down from zero.
    """
    bits = _bits(tensor).long()
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
