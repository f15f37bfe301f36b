"""`verify`: compares a pipelined run with a sequential run, at every transfer of a latent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.config.tolerance import Tolerance
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.request import PipelineRequest
from svdpp.driver.resolve import check_memory, resolve_config
from svdpp.driver.supervisor import Observer, OpenObserver, Supervisor, no_observer
from svdpp.errors import RequestError
from svdpp.launch import process_group
from svdpp.launch.process_lifetime import temp_folder
from svdpp.launch.worker_group import LaunchContext, start_ranks
from svdpp.launch.world import find_world
from svdpp.models.base import LATENTS, PREDICTION, Tensors
from svdpp.plan.parallel import LayoutName
from svdpp.verification.reference_setup import ReferenceSetup
from svdpp.verification.result import (
    Check,
    CheckLocation,
    Side,
    TensorKind,
    VerificationResult,
    compare_tensors,
)
from svdpp.worker.background import Reporter
from svdpp.worker.device import reset_peak
from svdpp.worker.messages import ClipDone
from svdpp.worker.rank import run_rank, wait_for_stop
from svdpp.worker.tensor_files import TensorStore, solver_history

#: Axes of the decoded tensors, one letter each, such as S for samples and C for channels.
_DECODED: dict[TensorKind, str] = {"frames": "FHWC", "audio": "SC"}


def verify(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    layout: LayoutName | None = None,
    fault: Callable[[int], object] | None = None,
    observers: Sequence[Observer] = (),
    open_observer: OpenObserver = no_observer,
) -> VerificationResult:
    """Make clips in a pipelined run and in a sequential run, and compare latents, frames and sound.

    The compared tensors are the latent at each transfer, the final latent, the frames and the
    sound. The ranks also exchange other tensors, such as predictions for a guidance branch and the
    history of a multistep solver. The result has these only if their bits differ; see
    `Check.what`. Each element may differ by atol + rtol * abs(expected), as in
    `torch.testing.assert_close`; by default every bit must be equal.

    Args:
        config: Configuration of the pipelined run. The sequential run has the same model and
            parameters.
        requests: Clips to make. No files are written for them.
        atol: Allowed absolute difference of two elements. For frames and sound, it is a fraction of
            the highest level (255 or 32767).
        rtol: Allowed difference, as a fraction of the reference's element.
        layout: Name of a layout; `auto` chooses the best layout for these requests. None: the
            layout of `config`.
        fault: Function that each rank calls first, with its rank number. Tests inject faults with
            it.
        observers: Callbacks that get (rank, event) for each event of the ranks.
        open_observer: Function that opens an observer for each of the two runs, which are called
            "pipelined" and "sequential".

    Returns:
        Result of all comparisons. A difference is a result, not an error.

    Raises:
        RequestError: The request cannot be run, or a tolerance is negative or not finite.
        RankError: A rank of the pipelined run, or the reference, died or stalled.

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
    tolerance = Tolerance(atol=atol, rtol=rtol)
    if layout is not None:
        request = PipelineRequest.of(
            config, layout=layout, num_clips=len(requests), launched=find_world()
        )
        config = request.resolve()[0]
    # A model with two experts switches to the second at a step that its config files determine.
    # The ranks' ranges of steps depend on this step, so the config files are read here.
    config = resolve_config(config, weights="none")[0]
    clips = range(len(requests))
    with temp_folder("svdpp-verify-") as folder:
        pipelined, sequential = folder / "pipelined", folder / "sequential"
        pipelined.mkdir()
        sequential.mkdir()
        schedule = config.layout.schedule(len(requests))
        with open_observer(pipelined.name, schedule) as observer:
            made = run_pipelined(config, requests, pipelined, fault, (observer, *observers))
        schedule = config.single_rank().layout.schedule(len(requests))
        with open_observer(sequential.name, schedule) as observer:
            steps = {end for clip in clips for _, end in _range_ends(config, clip)}
            expected = run_reference(
                config, requests, steps=steps, tensor_folder=sequential, observers=(observer,)
            )
        compare = _Comparison(config, TensorStore(pipelined), TensorStore(sequential), tolerance)
        checks = [check for clip in clips for check in compare.clip(clip)]
    return _verification_result(config, checks, made, expected, tolerance)


def _verification_result(
    config: PipelineConfig,
    checks: Sequence[Check],
    made: Sequence[dict[str, Any]],
    expected: Sequence[dict[str, Any]],
    tolerance: Tolerance,
) -> VerificationResult:
    """Return the result of verifying a run, from comparisons of tensors and the clips' metadata.

    Args:
        config: Configuration of the pipelined run.
        checks: Comparisons of tensors.
        made: Metadata of each clip of the pipelined run.
        expected: Metadata of each clip of the sequential run.
        tolerance: Allowed differences.
    """
    sides: dict[Side, Sequence[dict[str, Any]]] = {"ranks": made, "reference": expected}
    short = tuple(side for side, clips in sides.items() if any(map(_had_pressure, clips)))
    named = {"reference": "the sequential result"} if config.model.is_dummy else {}
    return VerificationResult(
        tuple(checks), made[0]["conditions"], tolerance, short_of_memory=short, **named
    )


def _had_pressure(metadata: dict[str, Any]) -> bool:
    return bool(metadata.get("memory_pressure"))


def run_pipelined(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
    fault: Callable[[int], object] | None = None,
    observers: Sequence[Observer] = (),
) -> list[dict[str, Any]]:
    """Make clips in a pipelined run, and keep the tensors that will be compared.

    Args:
        config: Configuration of the run.
        requests: Clips to make. No files are written for them.
        folder: Existing folder in which latents, frames and sound are kept.
        fault: Function that each rank calls first, with its rank number. Tests inject faults with
            it.
        observers: Callbacks that get (rank, event) for each event of the ranks.

    Returns:
        Metadata of each clip.
    """
    files = sorted({path for request in requests for path, _ in request.files.values()})
    pipeline = Pipeline(config, tensor_folder=str(folder), shared_paths=files, fault=fault)
    if pipeline.checkpoint is not None:
        for request in requests:
            pipeline.checkpoint.check_request(config.sampling, request)
    for observer in observers:
        pipeline.observe(observer)
    # If there are several hosts, this host has only the weights that its own ranks need. The
    # reference needs all weights, so this call downloads those that are missing.
    if pipeline.world is not None and pipeline.world.spans_hosts:
        resolve_config(config.single_rank(), weights="all")
    with pipeline:
        results = pipeline.run(requests)
    # If a launcher (such as torchrun) started the ranks, this process itself was rank 0. It still
    # holds GPU memory, which the process of the reference needs on the same device.
    if pipeline.world is not None:
        reset_peak()
    return [result.metadata for result in results]


def run_reference(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    *,
    steps: Iterable[int] = (),
    tensor_folder: Path | None = None,
    observers: Sequence[Observer] = (),
) -> list[dict[str, Any]]:
    """Compute clips with diffusers' unmodified pipeline, in a separate process.

    Args:
        config: Configuration of the pipelined run. The reference uses one of its devices.
        requests: Clips to make. No files are written for them.
        steps: Numbers of finished steps at which the latent is kept, such as 4 to keep the latent
            after four steps.
        tensor_folder: Existing folder in which latents, frames and sound are kept. None: no tensors
            are kept.
        observers: Callbacks that get (0, event) for each event of the reference's process.

    Returns:
        Metadata of each clip: hashes of its tensors, and whether GPU memory ran short.

    Raises:
        RequestError: A request has its own sampling parameters, or cannot be run.
        OutOfMemoryError: The model does not fit on one device.
        RankError: The reference's process died or stalled.
    """
    if any(request.sampling is not None for request in requests):
        raise RequestError(
            "the reference cannot make clips whose requests have their own sampling parameters",
            "set the sampling parameters in the configuration",
        )
    alone, checkpoint = resolve_config(config.single_rank())
    check_memory(alone, checkpoint, alone.layout.roles)
    setup = ReferenceSetup(
        config=alone,
        checkpoint=checkpoint,
        requests=tuple(requests),
        steps=frozenset(steps),
        folder=tensor_folder,
        predictions=config.parallel.cfg_parallel_size > 1,
    )
    process_group.check_devices(alone.device, 1)
    group = start_ranks(
        _reference_main,
        setup,
        world_size=1,
        backend=process_group.choose_backend(alone.device, 1),
        device=alone.device,
        start_timeout=alone.start_timeout_seconds,
    )
    metadata: dict[int, dict[str, Any]] = {}

    def collect(rank: int, event: object) -> None:  # noqa: ARG001
        if isinstance(event, ClipDone):
            metadata[event.clip] = event.metadata

    supervisor = Supervisor(group, alone, collect, *observers)
    try:
        supervisor.supervise(lambda: len(metadata) == len(requests))
    finally:
        supervisor.kill()
    return [metadata[clip] for clip in sorted(metadata)]


def _reference_main(launch: LaunchContext, setup: ReferenceSetup) -> None:
    def compute(device: torch.device, reporter: Reporter) -> None:
        # This import takes seconds, and is needed only in the reference process.
        from svdpp.verification.reference import compute_all

        compute_all(str(device), reporter, setup)
        wait_for_stop(launch.channel)

    run_rank(launch, setup.config, compute)


@dataclass(frozen=True)
class _Comparison:
    """Comparison of the tensors from the ranks (`ours`) with those of the reference (`theirs`)."""

    config: PipelineConfig
    ours: TensorStore
    theirs: TensorStore
    tolerance: Tolerance

    def clip(self, clip: int) -> Iterator[Check]:
        """Compare the tensors of one clip with the reference's, and yield the checks.

        The order is: predictions, the latent at the end of each rank's range of steps, frames,
        sound.
        """
        config = self.config
        num_steps, axes = config.sampling.num_inference_steps, _step_axes(config)
        yield from _first_failure(self._predictions(clip))
        for rank, end in _range_ends(config, clip):
            location = CheckLocation(clip, end, rank)
            our, their = (store.load(clip, f"step{end}") for store in (self.ours, self.theirs))
            what: TensorKind = "final_latent" if end == num_steps else "latent"
            yield self._compare(what, our[LATENTS], their[LATENTS], location, axes)
            yield from _first_failure(self._histories(our, their, location))
        location = CheckLocation(clip, num_steps, config.layout.route(clip).ranges[-1].rank)
        for name, axes in _DECODED.items() if config.decodes else ():
            if name == "frames" or self.theirs.has(clip, name):
                our, their = (store.load(clip, name) for store in (self.ours, self.theirs))
                yield self._compare(name, our[name], their[name], location, axes)

    def _histories(
        self, ours: Tensors, theirs: Tensors, location: CheckLocation
    ) -> Iterator[Check]:
        expected = solver_history(theirs)
        for name, tensor in solver_history(ours).items():
            # Some pipelines copy their scheduler, and ranks send the tensors of all copies. The
            # reference records only one scheduler, so the other copies cannot be compared.
            if name in expected:
                yield self._compare("solver_history", tensor, expected[name], location)

    def _predictions(self, clip: int) -> Iterator[Check]:
        """Compare the predictions that two ranks exchange (`cfg_parallel` 2) with the reference."""
        if self.config.parallel.cfg_parallel_size == 1 or not self.theirs.has(
            clip, "step0_branch0"
        ):
            return
        axes, parts = _step_axes(self.config), self.config.layout.route(clip).ranges
        steps = ((part.rank, step) for part in parts for step in range(part.start, part.end))
        for (first_rank, step), branch in itertools.product(steps, (0, 1)):
            name = f"step{step}_branch{branch}"
            if branch == 1 and not self.theirs.has(clip, name):
                continue  # the step has only one evaluation, because its guidance is off
            location = CheckLocation(clip, step, first_rank + branch)
            our, their = (store.load(clip, name)[PREDICTION] for store in (self.ours, self.theirs))
            yield replace(self._compare("prediction", our, their, location, axes), branch=branch)

    def _compare(
        self,
        what: TensorKind,
        ours: torch.Tensor,
        theirs: torch.Tensor,
        location: CheckLocation,
        axes: str = "",
    ) -> Check:
        return compare_tensors(what, ours, theirs, location, axes, self.tolerance)


def _first_failure(checks: Iterator[Check]) -> list[Check]:
    """Return a list with only the first failed comparison of tensors.

    If no check has failed, return the first check in which bits differ. If all bits are equal,
    return an empty list.
    """
    first = None
    for check in checks:
        if not check.equal:
            return [check]
        if first is None and not check.bitwise:
            first = check
    return [] if first is None else [first]


def _step_axes(config: PipelineConfig) -> str:
    return "BCFHW" if config.model.is_dummy else config.sampling.step_axes


def _range_ends(config: PipelineConfig, clip: int) -> list[tuple[int, int]]:
    """Return (rank, number of finished steps) at the end of each rank's range of a clip's steps."""
    ranges = config.layout.route(clip).ranges
    return [(part.rank, part.end) for part in ranges if part.num_steps]
