"""The reference: diffusers' unmodified pipeline, one clip at a time, on one device.

It runs in a separate process, with the ranks' settings, and reports its times as a rank does. For
the dummy model it is a plain loop over the same network.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from svdpp.comm.streams import SideStream, mark
from svdpp.config import ClipRequest, PipelineConfig
from svdpp.driver.memory_check import check_memory
from svdpp.driver.rank_task import run_rank_task
from svdpp.driver.resolve import resolve
from svdpp.driver.supervisor import Observer
from svdpp.errors import RequestError
from svdpp.launch.group import RankContext
from svdpp.media import image as photos
from svdpp.media import video
from svdpp.models.base import LATENTS, PREDICTION, Audio, Frames, Tensors, solver_history
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Action, Kind
from svdpp.plan.layout import Roles
from svdpp.worker.memory import out_of_memory_named
from svdpp.worker.messages import ActionDone, ClipDone, Joined, StepDone
from svdpp.worker.rank import load_model
from svdpp.worker.reporter import Reporter
from svdpp.worker.tensor_store import TensorStore, audio_hashes, tensor_sha256


@dataclass(frozen=True, kw_only=True)
class _Setup:
    config: PipelineConfig
    checkpoint: Checkpoint | None
    requests: tuple[ClipRequest, ...]
    steps: frozenset[int]
    tensor_folder: str | None
    predictions: bool = False


def run_reference(
    config: PipelineConfig,
    requests: Iterable[ClipRequest],
    *,
    steps: Iterable[int] = (),
    tensor_folder: Path | None = None,
    observers: Sequence[Observer] = (),
) -> list[dict[str, Any]]:
    """Computes each clip sequentially and keeps its latents after `steps`, and its frames.

    Args:
        config: of the pipelined run; the reference ignores its number of ranks and layout.
        requests: of the clips; their outputs are not written.
        steps: numbers of steps done after which the latent is kept.
        tensor_folder: for latents and frames; None keeps neither.
        observers: called with (0, event) for each event of the reference.

    Returns:
        For each clip its `latents_sha256` and `frames_sha256` (None for the dummy model).
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
        predictions=config.cfg_parallel > 1,
        tensor_folder=None if tensor_folder is None else str(tensor_folder),
    )
    hashes: dict[int, dict[str, Any]] = {}

    def collect(rank: int, event: object) -> None:  # noqa: ARG001
        if isinstance(event, ClipDone):
            hashes[event.clip] = event.metadata

    run_rank_task(
        _compute_all,
        alone,
        setup,
        until=lambda: len(hashes) == len(setup.requests),
        observers=(collect, *observers),
    )
    return [hashes[clip] for clip in sorted(hashes)]


def _compute_all(
    context: RankContext,  # noqa: ARG001
    device: str,
    reporter: Reporter,
    config: PipelineConfig,  # noqa: ARG001
    setup: _Setup,
) -> None:
    begun = time.monotonic()
    checkpoint = setup.checkpoint
    with out_of_memory_named(None):
        model = _Diffusers(setup, checkpoint, device) if checkpoint else _Dummy(setup, device)
    reporter.send(Joined(device=device, load_seconds=time.monotonic() - begun))
    kept = _Kept(setup, device)
    for clip, request in enumerate(setup.requests):
        with out_of_memory_named("reference"):
            latent, frames = model.compute(request, _Hooks(clip, setup, device, reporter, kept))
        audio = kept.frames_and_audio(clip, frames, model.audio)
        metadata = {
            "latents_sha256": tensor_sha256(kept.on_host(latent)),
            "frames_sha256": None if frames is None else video.frames_sha256(frames),
            **audio_hashes(audio),
        }
        reporter.send(ClipDone(clip=clip, metadata=metadata))


class _Kept:
    """What is kept for the comparison, copied from the device; nothing without a folder."""

    def __init__(self, setup: _Setup, device: str) -> None:
        self._steps, self._predictions = setup.steps, setup.predictions
        self._store = TensorStore(Path(setup.tensor_folder)) if setup.tensor_folder else None
        self._copies = SideStream(torch.device(device))

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._copies.to_host(tensor, mark(tensor.device))

    def latent(self, clip: int, step: int, tensors: Tensors) -> None:
        if self._store is not None and step in self._steps:
            on_host = {name: self.on_host(tensor) for name, tensor in tensors.items()}
            self._store.keep_latent(clip, step, on_host[LATENTS], solver_history(on_host))

    def predictions(self, clip: int, step: int, tensors: Tensors) -> None:
        if self._store is not None and self._predictions:
            for name, tensor in tensors.items():
                if name.startswith(PREDICTION):
                    branch = int(name.removeprefix(PREDICTION).partition(".")[0])
                    self._store.keep_prediction(clip, step, branch, self.on_host(tensor))

    def frames_and_audio(
        self, clip: int, frames: Frames | None, audio: Audio | None
    ) -> Audio | None:
        """Returns the audio in host memory."""
        audio = audio and Audio(self.on_host(audio.samples), audio.rate)
        if self._store is not None and frames is not None:
            self._store.keep_frames(clip, frames)
            self._store.keep_audio(clip, audio)
        return audio


class _Hooks:
    """Called along one clip's way; reports its times as a rank does, and keeps its latents."""

    def __init__(
        self, clip: int, setup: _Setup, device: str, reporter: Reporter, kept: _Kept
    ) -> None:
        self._clip = clip
        self._num_steps = setup.config.sampling.num_inference_steps
        self._device = torch.device(device)
        self._reporter = reporter
        self._kept = kept
        self._begun = self._mark = time.monotonic()

    def before_steps(self) -> None:
        """Called before the first step; the time until then is the encode's."""
        self._report(Action.at(Kind.ENCODE, self._clip, 0), self._now())

    def after_step(self, step: int, tensors: Tensors) -> None:
        now = self._now()
        self._reporter.send(StepDone(clip=self._clip, step=step, seconds=now - self._mark))
        self._mark = now
        if step + 1 == self._num_steps:
            self._report(Action(Kind.DENOISE, self._clip, 0, self._num_steps), now)
        self._kept.latent(self._clip, step + 1, tensors)
        self._kept.predictions(self._clip, step, tensors)

    def after_decode(self) -> None:
        self._report(Action.at(Kind.DECODE, self._clip, self._num_steps), self._now())

    def _report(self, action: Action, now: float) -> None:
        done = ActionDone(action=action, start=self._begun, end=now, waited=0.0)
        self._reporter.send(done)
        self._begun = self._mark = now

    def _now(self) -> float:
        """The time once the device has finished its work, as a rank measures it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


class _Diffusers:
    """diffusers' own pipeline of the model's family."""

    def __init__(self, setup: _Setup, checkpoint: Checkpoint, device: str) -> None:
        self._setup = setup
        from svdpp.models.engine.reference import Reference  # imports diffusers: seconds

        self._reference = Reference(checkpoint, setup.config.model, device)

    def compute(self, request: ClipRequest, hooks: _Hooks) -> tuple[torch.Tensor, Frames]:
        latent, frames = self._reference.run(
            request,
            self._photo(request),
            self._setup.config.sampling,
            before_steps=hooks.before_steps,
            after_step=hooks.after_step,
        )
        hooks.after_decode()
        return latent, frames

    @property
    def audio(self) -> Audio | None:
        return self._reference.audio

    def _photo(self, request: ClipRequest) -> Image.Image | None:
        if request.image is None:
            return None
        sampling = self._setup.config.sampling
        image, _ = photos.read_photo(Path(request.image))
        return photos.fit_photo(image, sampling.width, sampling.height, sampling.fit)


class _Dummy:
    """The plain loop over the dummy network."""

    audio = None

    def __init__(self, setup: _Setup, device: str) -> None:
        self._setup = setup
        roles = Roles(encode=True, denoise=True, decode=False)
        self._model = load_model(setup.config, None, device, roles)

    def compute(self, request: ClipRequest, hooks: _Hooks) -> tuple[torch.Tensor, None]:
        def after_step(step: int, latent: torch.Tensor) -> None:
            hooks.after_step(step, {LATENTS: latent})

        tensors = self._model.encode({}, request)
        hooks.before_steps()
        num_steps = self._setup.config.sampling.num_inference_steps
        return self._model.denoise(tensors, 0, num_steps, after_step)[LATENTS], None
