"""Dummy model: a small Conv3d network with the interface of a real model.

The dummy model replaces SVD in benchmarks on a laptop, and in tests that do not need a real model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from svdpp.config import ClipRequest, LatentSpec, Lora, SamplingConfig
from svdpp.models.base import (
    DTYPES,
    FRAMES,
    LATENTS,
    AfterStep,
    Audio,
    ModelInput,
    Partner,
    PreparedInput,
    Tensors,
)
from svdpp.plan.actions import DecodeRange
from svdpp.plan.costs import CostModel, PartFlops


class DummyUNet(nn.Module):
    """Denoiser of the dummy model: two Conv3d layers, with the same weights in every process."""

    def __init__(self, channels: int = 4, hidden: int = 16, num_steps: int = 28) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.widen = nn.Conv3d(channels, hidden, kernel_size=3, padding=1)
        self.narrow = nn.Conv3d(hidden, channels, kernel_size=3, padding=1)
        generator = torch.Generator().manual_seed(20231121)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """Run one denoising step of the dummy model.

        Args:
            latent: (B, C, F, H, W), in the network's dtype.
            step: Index of the step, on which the result depends.

        Returns:
            The latent after the step, with unchanged shape and dtype.
        """
        level = 1.0 - step / self.num_steps
        residual: torch.Tensor = self.narrow(torch.nn.functional.silu(self.widen(latent) + level))
        return latent + residual / self.num_steps


@dataclass(eq=False)
class DummyModel:
    """Dummy model with the interface of `EngineModel`.

    The encode draws noise from the seed, and the decode returns black frames. If `costs` is given,
    each encode, step and decode sleeps until it has lasted as long as `costs` predicts for `rank`.
    In this way, a fast machine can imitate a slow device.
    """

    spec: LatentSpec
    num_steps: int
    device: torch.device
    costs: CostModel | None = None
    rank: int = 0
    audio: Audio | None = None
    """Sound of the last clip; always None, because the dummy model makes no sound."""

    def __post_init__(self) -> None:
        self._dtype = DTYPES[self.spec.dtype]
        unet = DummyUNet(self.spec.shape[1], num_steps=self.num_steps)
        self._unet = unet.to(self.device, self._dtype).eval().requires_grad_(False)

    def with_sampling(self, sampling: SamplingConfig) -> DummyModel:
        """Return a dummy model with equal weights, for clips with the parameters `sampling`.

        Only the numbers of steps and frames are used.
        """
        batch, channels, _, *size = self.spec.shape
        spec = replace(self.spec, shape=(batch, channels, sampling.frames, *size))
        return replace(self, spec=spec, num_steps=sampling.num_inference_steps)

    def latent_spec(self, step: int) -> LatentSpec:  # noqa: ARG002
        """Return shape and dtype of a dummy clip's latent, which are the same after every step."""
        return self.spec

    def tensor_specs(self, tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:  # noqa: ARG002
        """Return shape and dtype of a dummy clip's only tensor, the latent, by tensor name."""
        return {LATENTS: (self.spec.shape, self._dtype)}

    def prepare(self, source: ModelInput) -> Tensors:  # noqa: ARG002
        """Return an empty dict, because the dummy model uses no image."""
        return {}

    def use_loras(self, loras: tuple[Lora, ...]) -> None:
        """Check that a clip has no LoRAs, because the dummy model supports none."""
        assert not loras, "the dummy model takes no LoRAs"

    def encode(self, prepared: PreparedInput, request: ClipRequest) -> Tensors:  # noqa: ARG002
        """Draw a dummy clip's noise on the CPU, so that every device starts from the same latent.

        Args:
            prepared: Visual input, which is ignored.
            request: Request for the clip, of which only the seed is used.

        Returns:
            Clip's state before step 0: only the latent, (B, C, F, H, W) in the model's dtype.
        """
        with self._lasting(CostModel.encode_on):
            generator = torch.Generator().manual_seed(request.seed)
            noise = torch.randn(self.spec.shape, generator=generator)
            return {LATENTS: noise.to(self.device, self._dtype)}

    def truncated_text(self, prompt: str) -> str:  # noqa: ARG002
        """Return an empty string, because the dummy model takes no prompt."""
        return ""

    def denoise(
        self,
        tensors: Tensors,
        start: int,
        end: int,
        after_step: AfterStep,
        partner: Partner | None = None,
    ) -> Tensors:
        """Run steps `start` to `end` (exclusive) of the dummy model, and return the new latent.

        The latent is the only state between steps.

        Args:
            tensors: Clip's state before step `start`, by tensor name.
            start: Index of the first step.
            end: Index after the last step.
            after_step: Callback that gets each step's index and its latent.
            partner: Other rank, if two ranks share each step. Each of them contributes half of the
                latent's elements, and a step takes half of the seconds in `costs`. None: this rank
                does the whole step.

        Returns:
            Clip's state before step `end`.
        """
        latent = tensors[LATENTS]
        for step in range(start, end):
            if partner is None:
                with self._lasting(CostModel.step_on):
                    latent = self._unet(latent, step)
            else:
                own: Tensors = {}
                half = partial(self._half, latent, step, partner.branch, own)
                other = partner.exchange(step, half)
                halves = [own[LATENTS], other[LATENTS]][:: -1 if partner.branch else 1]
                first, second = halves
                rest = second[first.numel() + second.numel() - latent.numel() :]
                latent = torch.cat((first, rest)).view(latent.shape)
            after_step(step, latent)
        return {**tensors, LATENTS: latent}

    def _half(self, latent: torch.Tensor, step: int, branch: int, own: Tensors) -> Tensors:
        """Run a dummy step that two ranks share, and return this rank's half of the new latent.

        The half is a flat tensor. It is also stored in `own`, because the caller needs it after the
        exchange with the other rank. `branch` is 0 for the rank with the first half, and 1 for the
        rank with the second half. If the number of elements is odd, both halves contain the middle
        element.
        """
        with self._lasting(CostModel.step_on, 0.5):
            flat = self._unet(latent, step).view(-1)
            size = (flat.numel() + 1) // 2
            own[LATENTS] = flat[-size:] if branch else flat[:size]
        return own

    def decode(self, tensors: Tensors) -> torch.Tensor:
        """Return a small black frame for each frame of a dummy clip.

        If `costs` is given, the call takes at least the seconds of a decode in `costs`.

        Args:
            tensors: Clip's state after the last step, which is not used.

        Returns:
            Frames, (F, 8, 8, 3) uint8, on the model's device.
        """
        count = self.spec.shape[2]
        return self.decode_part(tensors, DecodeRange(0, count, count))[FRAMES]

    def decode_part(self, tensors: Tensors, part: DecodeRange) -> Tensors:  # noqa: ARG002
        """Return the black frames of one part of a dummy clip.

        If `costs` is given, the call takes at least the part's share of the decode's seconds.

        Args:
            tensors: Clip's state after the last step, which is not used.
            part: Range of frames.
        """
        with self._lasting(CostModel.decode_on, part.fraction):
            shape = part.end - part.first, 8, 8, 3
            return {FRAMES: torch.zeros(shape, dtype=torch.uint8, device=self.device)}

    def part_specs(
        self, own: Tensors, part: DecodeRange
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the dummy frames that another rank decodes, by tensor name.

        Args:
            own: Frames that this rank has decoded.
            part: Range of frames that the other rank decodes.
        """
        frames = own[FRAMES]
        return {FRAMES: ((part.end - part.first, *frames.shape[1:]), frames.dtype)}

    def join_parts(self, tensors: Tensors, parts: Sequence[Tensors]) -> torch.Tensor:  # noqa: ARG002
        """Join the parts of a dummy clip that several ranks have decoded, and return all frames.

        Args:
            tensors: Clip's state after the last step, which is not used.
            parts: Results of `decode_part`, in the order of the frames.

        Returns:
            Frames, (F, 8, 8, 3) uint8.
        """
        return torch.cat([part[FRAMES] for part in parts])

    @contextmanager
    def _lasting(
        self, seconds: Callable[[CostModel, int], float], share: float = 1.0
    ) -> Iterator[None]:
        """Sleep after the `with` block until it has lasted as long as `costs` predicts.

        Args:
            seconds: Method of `CostModel` that returns the predicted seconds of a rank's encode,
                step or decode.
            share: Fraction of these seconds that the block has to last.
        """
        start = time.monotonic()
        yield
        if self.costs is not None:
            end = start + seconds(self.costs, self.rank) * share
            time.sleep(max(0.0, end - time.monotonic()))


def count_flops(spec: LatentSpec, num_steps: int) -> PartFlops:
    """Count the FLOPs of one step of the dummy model, by a run on torch's meta device.

    The encode and the decode count as 0 FLOPs.

    Args:
        spec: Shape and dtype of the latent.
        num_steps: Number of denoising steps of a clip.
    """
    model = DummyModel(spec, num_steps, torch.device("meta"))
    latents = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
    with FlopCounterMode(display=False) as counter:
        model.denoise({LATENTS: latents}, 0, 1, lambda _, __: None)
    return PartFlops(encode=0, step=counter.get_total_flops(), decode=0)
