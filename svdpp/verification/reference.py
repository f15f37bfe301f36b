"""The reference: diffusers' unmodified pipeline, one clip at a time, on one device.

It runs in a separate process, with the ranks' settings, and reports its times as a rank does. For
the dummy model it is a plain loop over the same network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from svdpp.comm.streams import SideStream, mark
from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.resolve import check_memory, resolve
from svdpp.driver.supervisor import Observer, Supervisor
from svdpp.errors import RequestError
from svdpp.launch import process_group
from svdpp.launch.group import RankContext, start_ranks
from svdpp.media import video
from svdpp.media.inputs import read_source
from svdpp.media.video import Frames
from svdpp.models.base import LATENTS, PREDICTION, Audio, Tensors
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Action, Kind
from svdpp.plan.layout import Roles
from svdpp.worker.device import out_of_memory_named
from svdpp.worker.messages import ActionDone, ClipDone, Joined, StepDone
from svdpp.worker.rank import load_model, run_rank, wait_for_stop
from svdpp.worker.side_threads import Reporter
from svdpp.worker.tensor_files import (
    TensorStore,
    audio_hashes,
    keep_result,
    solver_history,
    tensor_sha256,
)


@dataclass(frozen=True, kw_only=True)
class _Setup:
    config: PipelineConfig
    checkpoint: Checkpoint | None
    requests: tuple[ClipRequest, ...]
    steps: frozenset[int]
    folder: Path | None
    predictions: bool


def run_reference(
    config: PipelineConfig,
    requests: Iterable[ClipRequest],
    *,
    steps: Iterable[int] = (),
    tensor_folder: Path | None = None,
    observers: Sequence[Observer] = (),
) -> list[dict[str, Any]]:
    """Computes each clip sequentially, without writing it; returns the hashes of each.

    Args:
        config: of the pipelined run; the reference ignores its number of ranks and layout.
        steps: numbers of steps done after which the latent is kept.
        tensor_folder: for latents and frames; None keeps neither.
        observers: called with (0, event) for each event of the reference.
    """
    if any(request.sampling is not None for request in requests):
        raise RequestError("the reference computes no clips with sampling parameters of their own")
    alone, checkpoint = resolve(config.alone())
    check_memory(alone, checkpoint, alone.layout.roles)
    setup = _Setup(
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
    group = start_ranks(_main, setup, world_size=1, backend=backend, device=alone.device)
    supervisor = Supervisor(group, alone, collect, *observers)
    try:
        supervisor.supervise(lambda: len(hashes) == len(setup.requests))
    finally:
        supervisor.kill()
    return [hashes[clip] for clip in sorted(hashes)]


def _main(context: RankContext, setup: _Setup) -> None:
    def work(device: torch.device, reporter: Reporter) -> None:
        _compute_all(str(device), reporter, setup)
        wait_for_stop(context.channel)

    run_rank(context, setup.config, work)


def _compute_all(device: str, reporter: Reporter, setup: _Setup) -> None:
    begun = time.monotonic()
    with out_of_memory_named(None):
        if setup.checkpoint is None:
            compute = _dummy(setup, device)
        else:
            compute = _diffusers(setup, setup.checkpoint, device)
    reporter.send(Joined(device=device, load_seconds=time.monotonic() - begun))
    recorder = _Recorder(setup, device, reporter)
    for clip, request in enumerate(setup.requests):
        recorder.begin(clip)
        with out_of_memory_named("reference"):
            result = compute(request, recorder)
        recorder.end(*result)


class _Recorder:
    """Called along each clip's way; reports its times as a rank does, and keeps what is compared.

    What it keeps is copied from the device; nothing without a folder.
    """

    def __init__(self, setup: _Setup, device: str, reporter: Reporter) -> None:
        self._setup, self._reporter = setup, reporter
        self._num_steps = setup.config.sampling.num_inference_steps
        self._device = torch.device(device)
        self._copies = SideStream(self._device)
        self._store = None if setup.folder is None else TensorStore(setup.folder)

    def begin(self, clip: int) -> None:
        self._clip = clip
        self._begun = self._mark = time.monotonic()

    def before_steps(self) -> None:
        self._report(Action.at(Kind.ENCODE, self._clip, 0), self._now())

    def after_step(self, step: int, tensors: Tensors) -> None:
        now = self._now()
        self._reporter.send(StepDone(clip=self._clip, step=step, seconds=now - self._mark))
        self._mark = now
        if step + 1 == self._num_steps:
            self._report(Action(Kind.DENOISE, self._clip, 0, self._num_steps), now)
        if self._store is not None:
            self._keep(self._store, step, tensors)

    def after_decode(self) -> None:
        self._report(Action.at(Kind.DECODE, self._clip, self._num_steps), self._now())

    def end(self, latent: torch.Tensor, frames: Frames | None, audio: Audio | None) -> None:
        audio = audio and Audio(self._on_host(audio.samples), audio.rate)
        if self._store is not None and frames is not None:
            keep_result(self._store, self._clip, frames, audio)
        metadata = {
            "latents_sha256": tensor_sha256(self._on_host(latent)),
            "frames_sha256": None if frames is None else video.frames_sha256(frames),
            **audio_hashes(audio),
        }
        self._reporter.send(ClipDone(clip=self._clip, metadata=metadata))

    def _keep(self, store: TensorStore, step: int, tensors: Tensors) -> None:
        if step + 1 in self._setup.steps:
            kept = {LATENTS: tensors[LATENTS], **solver_history(tensors)}
            on_host = {name: self._on_host(tensor) for name, tensor in kept.items()}
            store.keep(self._clip, f"step{step + 1}", on_host)
        for name, tensor in tensors.items() if self._setup.predictions else ():
            if name.startswith(PREDICTION):
                branch = int(name.removeprefix(PREDICTION).partition(".")[0])
                on_host = {PREDICTION: self._on_host(tensor)}
                store.keep(self._clip, f"step{step}_branch{branch}", on_host)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._copies.to_host(tensor, mark(tensor.device))

    def _report(self, action: Action, now: float) -> None:
        self._reporter.send(ActionDone(action=action, start=self._begun, end=now, waited=0.0))
        self._begun = self._mark = now

    def _now(self) -> float:
        """The time once the device has finished its work, as a rank measures it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


#: Computes a clip: its last latent, frames and audio.
_Compute = Callable[[ClipRequest, _Recorder], tuple[torch.Tensor, Frames | None, Audio | None]]


def _diffusers(setup: _Setup, checkpoint: Checkpoint, device: str) -> _Compute:
    from svdpp.verification.whole_call import Reference  # imports diffusers: seconds

    reference, sampling = Reference(checkpoint, setup.config.model, device), setup.config.sampling

    def compute(
        request: ClipRequest, recorder: _Recorder
    ) -> tuple[torch.Tensor, Frames, Audio | None]:
        made = reference.run(
            request,
            read_source(request, sampling),
            sampling,
            before_steps=recorder.before_steps,
            after_step=recorder.after_step,
        )
        recorder.after_decode()
        return made

    return compute


def _dummy(setup: _Setup, device: str) -> _Compute:
    model = load_model(setup.config, None, device, Roles(encode=True, denoise=True))
    num_steps = setup.config.sampling.num_inference_steps

    def compute(request: ClipRequest, recorder: _Recorder) -> tuple[torch.Tensor, None, None]:
        def after_step(step: int, latent: torch.Tensor) -> None:
            recorder.after_step(step, {LATENTS: latent})

        tensors = model.encode({}, request)
        recorder.before_steps()
        return model.denoise(tensors, 0, num_steps, after_step)[LATENTS], None, None

    return compute
