"""The proof: the pipelined run against the sequential one, bit for bit at every transfer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve
from svdpp.driver.supervisor import Observer
from svdpp.launch.process_lifetime import temp_folder
from svdpp.models.base import LATENTS, PREDICTION, Tensors
from svdpp.verification.reference import run_reference
from svdpp.verification.result import (
    Check,
    Place,
    VerificationResult,
    compare_latents,
    compare_levels,
)
from svdpp.worker.device import reset_peak
from svdpp.worker.tensor_files import TensorStore, solver_history

_PIPELINED, _SEQUENTIAL = "pipelined", "sequential"
_DECODED: tuple[Literal["frames", "audio"], ...] = ("frames", "audio")


def verify(
    config: PipelineConfig, requests: Sequence[ClipRequest], *, tolerance: float = 0.0
) -> VerificationResult:
    """Runs `requests` through the ranks, then sequentially, and compares the latents.

    Args:
        config: of the pipelined run; the reference has the same model, options and threads.
        requests: of the clips; their outputs are not written.
        tolerance: the largest difference that counts as equal; 0 requires equal bits.

    Example:
        >>> from svdpp import ClipRequest, ModelConfig, PipelineConfig, SvdSampling, verify
        >>> config = PipelineConfig(
        ...     world_size=2,
        ...     model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
        ...     sampling=SvdSampling(num_inference_steps=4),
        ... )
        >>> verify(config, [ClipRequest(seed=0)]).bitwise
        True
    """
    with temp_folder("svdpp-verify-") as folder:
        run_pipelined(config, requests, folder)
        run_sequential(config, requests, folder)
        return compare(config, len(requests), folder, tolerance=tolerance)


def run_pipelined(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
    *,
    fault: Callable[[int], object] | None = None,
    observers: Sequence[Observer] = (),
) -> dict[str, Any]:
    """Runs `requests` through the ranks and keeps the latent after each range under `folder`.

    Returns:
        The conditions in the first clip's metadata, see `worker.device.conditions_of`.
    """
    kept = folder / _PIPELINED
    kept.mkdir()
    files = sorted({path for request in requests for path, _ in request.files.values()})
    pipeline = Pipeline(config, tensor_folder=str(kept), shared_paths=files, fault=fault)
    for observer in observers:
        pipeline.observe(observer)
    if pipeline.spans_hosts:  # this host has the weights of its own ranks; the reference needs all
        resolve(config.alone(), weights="all")
    with pipeline:
        results = pipeline.run(requests)
    if pipeline.world is not None:  # this process was rank 0; the reference needs its memory
        reset_peak()
    conditions: dict[str, Any] = results[0].metadata["conditions"]
    return conditions


def run_sequential(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
    *,
    observers: Sequence[Observer] = (),
) -> None:
    """Runs `requests` through the reference and keeps the same latents under `folder`."""
    kept = folder / _SEQUENTIAL
    kept.mkdir()
    steps = {end for clip in range(len(requests)) for _, end in _parts(config, clip)}
    run_reference(config, requests, steps=steps, tensor_folder=kept, observers=observers)


def compare(
    config: PipelineConfig, num_clips: int, folder: Path, *, tolerance: float = 0.0
) -> VerificationResult:
    """Compares what `run_pipelined` and `run_sequential` kept under `folder`."""
    ours, theirs = TensorStore(folder / _PIPELINED), TensorStore(folder / _SEQUENTIAL)
    clips = (_compare_clip(config, clip, ours, theirs, tolerance) for clip in range(num_clips))
    return VerificationResult(tuple(itertools.chain.from_iterable(clips)))


def _compare_clip(
    config: PipelineConfig, clip: int, ours: TensorStore, theirs: TensorStore, tolerance: float
) -> Iterator[Check]:
    num_steps, axes = config.sampling.num_inference_steps, _latent_axes(config)
    yield from _first_different_prediction(config, ours, theirs, clip)
    for rank, end in _parts(config, clip):
        place = Place(clip, end, rank)
        both = ours.load(clip, f"step{end}"), theirs.load(clip, f"step{end}")
        our_latent, their_latent = (tensors[LATENTS] for tensors in both)
        final = end == num_steps
        yield compare_latents(
            our_latent, their_latent, place, final=final, tolerance=tolerance, axes=axes
        )
        yield from _first_different_history(*both, place)
    rank = config.layout.route(clip).ranges[-1].rank
    for what in _DECODED if config.decodes else ():
        if what == "frames" or theirs.has(clip, what):
            our_levels, their_levels = (s.load(clip, what)[what].numpy() for s in (ours, theirs))
            place = Place(clip, num_steps, rank)
            yield compare_levels(what, our_levels, their_levels, place, tolerance=tolerance)


def _first_different_history(ours: Tensors, theirs: Tensors, place: Place) -> list[Check]:
    """The first part of the solver's history that differs after a number of steps, if any."""
    expected = solver_history(theirs)
    for name, tensor in solver_history(ours).items():
        if name in expected:  # else of a copy that the pipeline has made of its scheduler
            check = compare_latents(tensor, expected[name], place, axes="")
            if not check.bitwise:
                return [replace(check, what="solver_history")]
    return []


def _first_different_prediction(
    config: PipelineConfig, ours: TensorStore, theirs: TensorStore, clip: int
) -> list[Check]:
    """The first prediction that differs between the ranks of a pair and the reference, if any."""
    if config.cfg_parallel == 1 or not theirs.has(clip, "step0_branch0"):
        return []
    parts = config.layout.route(clip).ranges
    steps = ((part.rank, step) for part in parts for step in range(part.start, part.end))
    for (first_rank, step), branch in itertools.product(steps, (0, 1)):
        name = f"step{step}_branch{branch}"
        one, other = (store.load(clip, name)[PREDICTION] for store in (ours, theirs))
        place = Place(clip, step, first_rank + branch)
        check = compare_latents(one, other, place, axes=_latent_axes(config))
        if not check.bitwise:
            return [replace(check, what="prediction", branch=branch)]
    return []


def _latent_axes(config: PipelineConfig) -> str:
    """The axes of the model's latents, one letter each; see `CommonSampling.latent_axes`."""
    return "BCFHW" if config.model.is_dummy else config.sampling.latent_axes


def _parts(config: PipelineConfig, clip: int) -> list[tuple[int, int]]:
    """(rank, steps done) at the end of each range of steps."""
    ranges = config.layout.route(clip).ranges
    return [(part.rank, part.end) for part in ranges if part.num_steps]
