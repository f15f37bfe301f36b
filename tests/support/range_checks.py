"""Comparison of ranks that run ranges of steps with one `__call__` of diffusers' pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.config.pipeline import reference_names
from svdpp.media.video import Frames
from svdpp.models.base import DTYPES, LATENTS, Audio, ModelInput, Tensors
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.engine.factory import load_engine_model
from svdpp.models.engine.model import EngineModel
from svdpp.plan.roles import Roles
from svdpp.verification.reference import Reference

PROMPT = "a cat walks over the grass"


def read_folder(folder: Path, family: str | None = None) -> Any:
    """Read the model's checkpoint in `folder`, except its weights."""
    return find_checkpoint(ModelConfig(name=str(folder), family=family), weights=False)


def model_of(checkpoint: Any, dtype: Any = "fp32") -> ModelConfig:
    """Return the `ModelConfig` that names a checkpoint, with a dtype."""
    return ModelConfig(name=checkpoint.name, family=checkpoint.family, dtype=dtype)


def photograph(seed: int = 0) -> Image.Image:
    """Return an image whose aspect ratio differs from that of every frame size in the tests."""
    pixels = np.random.default_rng(seed).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def source(sampling: Any) -> ModelInput:
    """Return the input of a test's clip, at its frame size: images, frames of a video, or both."""
    if sampling.has_last_image:
        return {"image": photograph(), "last_image": photograph(1)}
    if sampling.num_references:
        names = reference_names(sampling.num_references)
        others = {
            name: photograph(seed).rotate(90, expand=True) for seed, name in enumerate(names, 1)
        }
        return {"image": _frames(sampling) if sampling.from_video else photograph(), **others}
    if sampling.videos:
        sides = enumerate(sampling.videos.values(), start=1)
        videos = [_frames(sampling, seed, side) for seed, side in sides]
        return {"image": photograph(), **dict(zip(sampling.videos, videos, strict=True))}
    return _frames(sampling) if sampling.from_video else photograph()


def _frames(sampling: Any, seed: int = 0, side: int | None = None) -> list[Image.Image]:
    count = sampling.num_frames if sampling.videos else sampling.video_frames
    shape = (count, side or sampling.height, side or sampling.width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return [Image.fromarray(frame) for frame in pixels]


def nothing(_: int, __: torch.Tensor) -> None:
    """Stand-in for the callback after each step; it does nothing."""


def loaded(model: Any) -> dict[str, torch.nn.Module]:
    """Return the components whose weights a model has loaded, by name."""
    return {
        name: part
        for name, part in model._pipe.components.items()
        if isinstance(part, torch.nn.Module) and not hasattr(part, "is_skeleton")
    }


def ranks(
    checkpoint: Checkpoint, sampling: Any, *, model: ModelConfig | None = None
) -> Callable[[int, int], EngineModel]:
    """Return a function that loads a rank's model for a range of steps: only the needed components.

    The arguments of the function are `start` and `end` of the rank's range of steps. `(0, 0)` gives
    the model that encodes, and `(N, N)` the model that decodes. Models with the same components are
    loaded only once.
    """
    named = model or model_of(checkpoint)
    models: dict[Roles, EngineModel] = {}
    boundary, steps = checkpoint.expert_boundary(sampling), sampling.num_inference_steps

    def rank_for(start: int, end: int) -> EngineModel:
        experts = {int(boundary is not None and step >= boundary) for step in range(start, end)}
        roles = Roles(
            encode=(start, end) == (0, 0),
            denoise=start < end,
            decode=(start, end) == (steps, steps),
            experts=frozenset(experts),
        )
        if roles not in models:
            models[roles] = load_engine_model(checkpoint, named, sampling, "cpu", roles)
        return models[roles]

    return rank_for


@dataclass(frozen=True)
class TinyModel:
    """Checkpoint and clip of a test, with a model for each range of steps (see `ranks`)."""

    checkpoint: Any
    sampling: Any
    model: ModelConfig
    source: ModelInput | None

    @cached_property
    def rank_for(self) -> Callable[[int, int], EngineModel]:
        return ranks(self.checkpoint, self.sampling, model=self.model)

    @property
    def is_modular(self) -> bool:
        return self.checkpoint.spec.modular is not None

    @property
    def steps(self) -> int:
        return int(self.sampling.num_inference_steps)

    @property
    def encoder(self) -> EngineModel:
        return self.rank_for(0, 0)

    @property
    def decoder(self) -> EngineModel:
        return self.rank_for(self.steps, self.steps)

    def request(self, prompt: str = PROMPT, negative_prompt: str | None = None) -> ClipRequest:
        """Return the request for the test's clip, without prompts if the family takes none."""
        if not self.checkpoint.spec.takes_prompt:
            return ClipRequest(seed=3)
        return ClipRequest(seed=3, prompt=prompt, negative_prompt=negative_prompt)

    def encode(self, request: ClipRequest) -> Tensors:
        """Return the tensors of the clip's packet before the first step."""
        prepared = {} if self.source is None else self.encoder.prepare(self.source)
        return self.encoder.encode(prepared, request)

    def packets(self, negative_prompt: str | None = None) -> list[Tensors]:
        """Return the packets of the clip before the first step and after each step."""
        packets = [self.encode(self.request(negative_prompt=negative_prompt))]
        for step in range(self.steps):
            rank = self.rank_for(step, step + 1)
            packets.append(rank.denoise(packets[-1], step, step + 1, nothing))
        return packets


def check_every_cut(
    rank_for: Callable[[int, int], Any],
    num_steps: int,
    reference: tuple[list[torch.Tensor], Frames, Audio | None],
    request: ClipRequest,
    image: ModelInput | None,
) -> None:
    """Check that a clip that is split after any step has the same bits as the reference.

    `reference` is the result of `whole_clip`.
    """
    latents, frames, _ = reference
    encoder = rank_for(0, 0)
    packets = [encoder.encode({} if image is None else encoder.prepare(image), request)]
    for step in range(num_steps):
        packets.append(_run(rank_for, packets[-1], step, step + 1, latents))
    for step, packet in enumerate(packets):
        check_expected_tensors(rank_for, num_steps, step, packet)
    for cut in range(1, num_steps):
        assert_equal(_run(rank_for, packets[0], 0, cut, latents), packets[cut])
        assert_equal(_run(rank_for, packets[cut], cut, num_steps, latents), packets[-1])
    decoded = rank_for(num_steps, num_steps).decode(_received(packets[-1]))
    assert np.array_equal(decoded.numpy(), frames)


def check_expected_tensors(
    rank_for: Callable[[int, int], Any], num_steps: int, step: int, packet: Tensors
) -> None:
    """Check that receiving ranks expect just the tensors that a packet has after `step` steps.

    The receivers have other components than the sender, as in a run.
    """
    found = {name: (tuple(each.shape), each.dtype) for name, each in packet.items()}
    for receiver in (
        rank_for(step, min(step + 1, num_steps)),
        rank_for(num_steps, num_steps),
    ):
        spec, latent = receiver.latent_spec(step), packet[LATENTS]
        assert spec.shape == tuple(latent.shape), step
        assert DTYPES[spec.dtype] == latent.dtype, step
        assert len(spec.dims) == latent.dim()
        assert receiver.tensor_specs(packet) == found, step


def _run(
    rank_for: Callable[[int, int], Any],
    packet: Tensors,
    start: int,
    end: int,
    latents: list[torch.Tensor],
) -> Tensors:
    model, received, steps = rank_for(start, end), _received(packet), []

    def check(step: int, latent: torch.Tensor) -> None:
        steps.append(step)
        assert latent.dtype == latents[step].dtype
        assert torch.equal(latent, latents[step]), f"step {step} of {start} to {end}"
        # The first axis has one element, so its stride has no meaning.
        assert latent.stride()[1:] == latents[step].stride()[1:]

    result: Tensors = model.denoise(received, start, end, check)
    assert steps == list(range(start, end))
    assert_equal(received, packet)
    # A transfer makes tensors contiguous. So tensors must be contiguous before the transfer too,
    # because the memory layout can change the bits of later results.
    assert all(tensor.is_contiguous() for tensor in result.values())
    return result


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    """Check that two sets of named tensors have the same names and the same values."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def _received(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def whole_clip(
    model: ModelConfig, sampling: SamplingConfig, request: ClipRequest, image: ModelInput | None
) -> tuple[list[torch.Tensor], Frames, Audio | None]:
    """Make a clip with diffusers' unmodified pipeline, and return latents, frames and sound.

    Return the latents after each step, the frames, and the sound if there is any.
    """
    checkpoint = find_checkpoint(model)
    reference = Reference(checkpoint, model, "cpu", from_image=image is not None)
    return reference_clip(reference, checkpoint.resolve_sampling(sampling), request, image)


def reference_clip(
    reference: Reference,
    sampling: SamplingConfig,
    request: ClipRequest,
    image: ModelInput | None = None,
) -> tuple[list[torch.Tensor], Frames, Audio | None]:
    """Make a clip with a pipeline of diffusers that is already loaded; see `whole_clip`."""
    latents: list[torch.Tensor] = []
    _, frames, audio = reference.run(
        request,
        image,
        sampling,
        before_steps=lambda: None,
        after_step=lambda _, tensors: latents.append(tensors[LATENTS].clone()),
    )
    return latents, frames, audio
