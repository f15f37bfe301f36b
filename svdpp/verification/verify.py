"""The proof: the pipelined run against the sequential one, bit for bit at every transfer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import check_memory, resolve
from svdpp.driver.supervisor import Observer, OpenObserver, Supervisor, no_observer
from svdpp.errors import RequestError
from svdpp.launch import process_group
from svdpp.launch.group import RankContext, start_ranks
from svdpp.launch.process_lifetime import temp_folder
from svdpp.models.base import LATENTS, PREDICTION, Tensors
from svdpp.models.checkpoint import Checkpoint
from svdpp.worker.device import reset_peak
from svdpp.worker.messages import ClipDone
from svdpp.worker.rank import run_rank, wait_for_stop
from svdpp.worker.side_threads import Reporter
from svdpp.worker.tensor_files import TensorStore, solver_history, tensor_sha256

_INTEGERS = {2: torch.int16, 4: torch.int32}
_LEVELS = {"frames": 255, "audio": 32767}
_AXES = {"F": "frame", "S": "sample", "C": "channel", "H": "row", "W": "column"}

What = Literal["latent", "final_latent", "frames", "audio", "solver_history", "prediction"]
#: What is decoded, and its axes.
_DECODED: dict[What, str] = {"frames": "FHWC", "audio": "SC"}


class Place(NamedTuple):
    """Where a comparison belongs."""

    clip: int
    step: int
    """Number of steps done."""
    rank: int
    """The rank that computed it."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of the pipelined result with the sequential one."""

    clip: int
    what: What
    """The last two are listed only if they differ: what a multistep solver keeps of earlier steps,
    and what one rank of a pair has received from the other."""
    step: int
    rank: int
    equal: bool
    """Whether every bit is."""
    max_abs_diff: float
    """Infinite if one side has NaN there. Of frames and audio, a share of the highest level."""
    max_ulp: int
    """The largest distance in ULPs of the dtype; of frames and audio, in levels."""
    first_index: tuple[int, ...] | None
    """Of the first element that differs, in row-major order; None if none differs."""
    sha256: str
    """Of the pipelined side."""
    axes: str = ""
    """The tensor's axes, one letter each."""
    branch: int = -1
    """Of the guidance, 0 or 1, for a prediction."""
    psnr_db: float | None = None
    """Of a latent that differs, against the largest value of the sequential one."""

    @property
    def distance(self) -> str:
        """The largest difference with its unit: `1.19e-07 (1 ULP)`, or `3 of 255 levels`."""
        if self.what in _LEVELS:
            return f"{self.max_ulp} of {_LEVELS[self.what]} levels"
        ratio = "" if self.psnr_db is None else f", {self.psnr_db:.1f} dB"
        return f"{self.max_abs_diff:.3g} ({self.max_ulp} ULP{ratio})"

    def __str__(self) -> str:
        """The place and size of the difference, in words."""
        what = {
            "latent": f"the latent after step {self.step - 1}",
            "final_latent": "the final latent",
            "frames": "the frames",
            "audio": "the sound",
            "solver_history": f"the solver's history after step {self.step - 1}",
            "prediction": f"the prediction of branch {self.branch} in step {self.step}",
        }[self.what]
        index = self.first_index or ()
        numbers = dict(zip(self.axes, index, strict=False))  # B is always 0
        where = [f"{word} {numbers[axis]}" for axis, word in _AXES.items() if axis in numbers]
        return (
            f"clip {self.clip}, {what}, done by rank {self.rank}: first at {', '.join(where)} "
            f"(index {list(index)}), max difference {self.distance}"
        )


@dataclass(frozen=True)
class VerificationResult:
    """All checks, at least one: by clip, then in the order of the steps."""

    checks: tuple[Check, ...]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """What the bits depend on besides the requests, as the ranks have found it."""

    @property
    def bitwise(self) -> bool:
        """Whether every bit is equal."""
        return self.first_difference is None

    @property
    def max_abs_diff(self) -> float:
        """The largest difference of any latent or frame."""
        return max(check.max_abs_diff for check in self.checks)

    @property
    def first_difference(self) -> Check | None:
        """The first check that is not equal."""
        return next((check for check in self.checks if not check.equal), None)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        return {
            "schema_version": 1,
            "equal": self.bitwise,
            "bitwise": self.bitwise,  # as in versions that took a tolerance
            "max_abs_diff": self.max_abs_diff,
            "checks": [{**asdict(check), "bitwise": check.equal} for check in self.checks],
            "conditions": dict(self.conditions),
        }


def verify(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    *,
    fault: Callable[[int], object] | None = None,
    observers: Sequence[Observer] = (),
    open_observer: OpenObserver = no_observer,
) -> VerificationResult:
    """Runs `requests` through the ranks, then sequentially, and compares the latents.

    The outputs are not written. `fault` is for tests; see `Pipeline`. `observers` are of the ranks,
    and `open_observer` opens one for each of the two runs, "pipelined" and "sequential".

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
        pipelined, sequential = folder / "pipelined", folder / "sequential"
        for kept in (pipelined, sequential):
            kept.mkdir()
        with open_observer(pipelined.name, config.layout.schedule(len(requests))) as observer:
            observers = (observer, *observers)
            conditions = run_pipelined(config, requests, pipelined, fault, observers)
        with open_observer(sequential.name, config.alone().layout.schedule(len(requests))) as alone:
            steps = {end for clip in range(len(requests)) for _, end in _parts(config, clip)}
            run_reference(
                config, requests, steps=steps, tensor_folder=sequential, observers=(alone,)
            )
        ours, theirs = TensorStore(pipelined), TensorStore(sequential)
        clips = (_compare_clip(config, n, ours, theirs) for n in range(len(requests)))
        return VerificationResult(tuple(itertools.chain.from_iterable(clips)), conditions)


def run_pipelined(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    folder: Path,
    fault: Callable[[int], object] | None = None,
    observers: Sequence[Observer] = (),
) -> dict[str, Any]:
    """Runs `requests` through the ranks, keeps what is compared, and returns their conditions."""
    files = sorted({path for request in requests for path, _ in request.files.values()})
    pipeline = Pipeline(config, tensor_folder=str(folder), shared_paths=files, fault=fault)
    for observer in observers:
        pipeline.observe(observer)
    # This host has the weights of its own ranks; the reference needs all.
    if pipeline.world is not None and pipeline.world.spans_hosts:
        resolve(config.alone(), weights="all")
    with pipeline:
        results = pipeline.run(requests)
    if pipeline.world is not None:  # this process was rank 0; the reference needs its memory
        reset_peak()
    return dict(results[0].metadata["conditions"])


@dataclass(frozen=True, kw_only=True)
class ReferenceSetup:
    """What the process of the reference computes and keeps; see `run_reference`."""

    config: PipelineConfig
    checkpoint: Checkpoint | None
    requests: tuple[ClipRequest, ...]
    steps: frozenset[int]
    folder: Path | None
    predictions: bool
    """Whether it keeps those of each branch of the guidance."""


def run_reference(
    config: PipelineConfig,
    requests: Sequence[ClipRequest],
    *,
    steps: Iterable[int] = (),
    tensor_folder: Path | None = None,
    observers: Sequence[Observer] = (),
) -> list[dict[str, Any]]:
    """Computes each clip by diffusers in a process of its own; returns the hashes of each.

    `tensor_folder` gets the frames, and the latents after so many `steps`; None keeps neither.
    `observers` are called with (0, event) for each event of the reference.
    """
    if any(request.sampling is not None for request in requests):
        raise RequestError("the reference computes no clips with sampling parameters of their own")
    alone, checkpoint = resolve(config.alone())
    check_memory(alone, checkpoint, alone.layout.roles)
    setup = ReferenceSetup(
        config=alone,
        checkpoint=checkpoint,
        requests=tuple(requests),
        steps=frozenset(steps),
        folder=tensor_folder,
        predictions=config.cfg_parallel > 1,
    )
    hashes: dict[int, dict[str, Any]] = {}

    def collect(rank: int, event: object) -> None:  # noqa: ARG001
        if isinstance(event, ClipDone):
            hashes[event.clip] = event.metadata

    process_group.check_devices(alone.device, 1)
    backend = process_group.choose_backend(alone.device, 1)
    group = start_ranks(_reference_main, setup, world_size=1, backend=backend, device=alone.device)
    supervisor = Supervisor(group, alone, collect, *observers)
    try:
        supervisor.supervise(lambda: len(hashes) == len(setup.requests))
    finally:
        supervisor.kill()
    return [hashes[clip] for clip in sorted(hashes)]


def _reference_main(context: RankContext, setup: ReferenceSetup) -> None:
    def work(device: torch.device, reporter: Reporter) -> None:
        from svdpp.verification.reference import compute_all  # diffusers: seconds

        compute_all(str(device), reporter, setup)
        wait_for_stop(context.channel)

    run_rank(context, setup.config, work)


def _compare_clip(
    config: PipelineConfig, clip: int, ours: TensorStore, theirs: TensorStore
) -> Iterator[Check]:
    num_steps, axes = config.sampling.num_inference_steps, _latent_axes(config)
    yield from _first_different(_predictions(config, ours, theirs, clip))
    for rank, end in _parts(config, clip):
        place = Place(clip, end, rank)
        our, their = ours.load(clip, f"step{end}"), theirs.load(clip, f"step{end}")
        what: What = "final_latent" if end == num_steps else "latent"
        yield compare_tensors(what, our[LATENTS], their[LATENTS], place, axes)
        yield from _first_different(_histories(our, their, place))
    place = Place(clip, num_steps, config.layout.route(clip).ranges[-1].rank)
    for name, axes in _DECODED.items() if config.decodes else ():
        if name == "frames" or theirs.has(clip, name):
            our, their = ours.load(clip, name), theirs.load(clip, name)
            yield compare_tensors(name, our[name], their[name], place, axes)


def _histories(ours: Tensors, theirs: Tensors, place: Place) -> Iterator[Check]:
    expected = solver_history(theirs)
    for name, tensor in solver_history(ours).items():
        if name in expected:  # else of a copy that the pipeline has made of its scheduler
            yield compare_tensors("solver_history", tensor, expected[name], place)


def _predictions(
    config: PipelineConfig, ours: TensorStore, theirs: TensorStore, clip: int
) -> Iterator[Check]:
    """Compares what the ranks of a pair and the reference have predicted in each step."""
    if config.cfg_parallel == 1 or not theirs.has(clip, "step0_branch0"):
        return
    axes, parts = _latent_axes(config), config.layout.route(clip).ranges
    steps = ((part.rank, step) for part in parts for step in range(part.start, part.end))
    for (first_rank, step), branch in itertools.product(steps, (0, 1)):
        name, place = f"step{step}_branch{branch}", Place(clip, step, first_rank + branch)
        our, their = (store.load(clip, name)[PREDICTION] for store in (ours, theirs))
        yield replace(compare_tensors("prediction", our, their, place, axes), branch=branch)


def _first_different(checks: Iterator[Check]) -> Iterator[Check]:
    return itertools.islice((check for check in checks if not check.equal), 1)


def _latent_axes(config: PipelineConfig) -> str:
    return "BCFHW" if config.model.is_dummy else config.sampling.latent_axes


def _parts(config: PipelineConfig, clip: int) -> list[tuple[int, int]]:
    """(rank, steps done) at the end of each range of steps."""
    ranges = config.layout.route(clip).ranges
    return [(part.rank, part.end) for part in ranges if part.num_steps]


def compare_tensors(
    what: What,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    place: Place,
    axes: str = "",
) -> Check:
    """Compares two tensors of one shape and dtype, in host memory."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{what}: {ours.dtype} {ours.shape} against {theirs.dtype} {theirs.shape}")
    differs = _bits(ours) != _bits(theirs)
    equal, psnr_db = not bool(differs.any()), None
    max_ulp = int((_ordered(ours) - _ordered(theirs)).abs().max())
    if what in _LEVELS:
        max_abs_diff = max_ulp / _LEVELS[what]
    else:
        # Subtraction gives NaN for NaN and for two equal infinities.
        difference = (ours.double() - theirs.double()).abs().nan_to_num(nan=torch.inf)
        difference = torch.where(differs, difference, 0.0)
        max_abs_diff = float(difference.max())
        psnr_db = None if equal else _psnr_db(difference, theirs)
    return Check(
        **place._asdict(),
        what=what,
        equal=equal,
        max_abs_diff=max_abs_diff,
        max_ulp=max_ulp,
        first_index=None if equal else _first_index(differs),
        sha256=tensor_sha256(ours),
        axes=axes,
        psnr_db=psnr_db,
    )


def _first_index(differs: torch.Tensor) -> tuple[int, ...]:
    first = differs.flatten().byte().argmax()  # `nonzero` would take 8 bytes for each dimension
    return tuple(map(int, torch.unravel_index(first, differs.shape)))


def _psnr_db(difference: torch.Tensor, theirs: torch.Tensor) -> float | None:
    peak, error = float(theirs.double().abs().max()), float(difference.square().mean())
    ratio = peak**2 / error if error > 0 else math.inf
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers; distinguishes -0 from 0 and one NaN from another."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers, so that differences are ULPs, or levels.

    See Bruce Dawson, "Comparing Floating Point Numbers": negative numbers count down from zero.
    """
    if not tensor.is_floating_point():
        return tensor.int()
    bits = _bits(tensor).long()
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
