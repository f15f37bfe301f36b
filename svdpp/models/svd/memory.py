"""Owns the memory that a model's parts will take, told from its configs alone: no weight is read.

Each part is built without data, and the code that a rank runs is walked on tensors which have
shapes but no elements, while the birth and death of every storage is counted. Of what kernels take
for themselves only CPU convolutions are counted, where torch says which kernel it will choose.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensorMode

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.dummy import DummyUNet
from svdpp.models.live_bytes import LiveBytes
from svdpp.models.svd import load
from svdpp.models.svd.denoise import SvdDenoiser
from svdpp.models.svd.encode import ADDED_TIME_IDS, IMAGE_EMBEDDING, IMAGE_LATENTS
from svdpp.models.svd.weights import empty_module


class PartMemory(NamedTuple):
    """Bytes that one part takes on its device: while it rests, and above that at its peak."""

    weight_bytes: int
    activation_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Both."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What a model takes, part by part; None for a part that it does not have."""

    encode: PartMemory | None
    """Image encoder and VAE encoder, at the clip's size; a larger photograph comes on top."""
    denoise: PartMemory
    """The UNet, one step."""
    decode: PartMemory | None
    """The VAE decoder, `decode_chunk_size` frames at a time."""

    def of_rank(self, *, encode: bool, denoise: bool, decode: bool) -> PartMemory:
        """What a rank with these duties takes: the weights of all, and its hungriest moment."""
        wanted = ((encode, self.encode), (denoise, self.denoise), (decode, self.decode))
        held = [part for is_held, part in wanted if is_held and part is not None]
        return PartMemory(
            sum(part.weight_bytes for part in held),
            max((part.activation_bytes for part in held), default=0),
        )

    def as_costs(self) -> dict[str, float]:
        """The memory fields of `plan.costs.Costs`, GiB, by name; none for parts it has not."""
        parts = {"encode": self.encode, "denoise": self.denoise, "decode": self.decode}
        return {
            f"{name}_{kind}_gib": size / 2**30
            for name, part in parts.items()
            if part is not None
            for kind, size in (("weights", part.weight_bytes), ("work", part.activation_bytes))
        }


def estimate(
    checkpoint: Checkpoint | None,
    model: ModelConfig,
    sampling: SamplingConfig,
    *,
    device: str,
    num_threads: int = 1,
) -> MemoryEstimate:
    """What each part of a model will take, found in seconds and without its weights.

    Args:
        checkpoint: found and checked; None for the dummy model.
        model: its dtype is that of weights and latents.
        sampling: resolved, so that frame count and decode chunk are numbers.
        device: on `cpu` the kernels' own copies count as well; on CUDA cuDNN's workspaces do not.
        num_threads: intra-op threads of a CPU rank; torch chooses kernels by it.

    Raises:
        ModelError: a config is one that the model's class refuses.
    """
    walk = _Walk(load.torch_dtype(model.dtype), on_cpu=device == "cpu")
    with _threads(num_threads):
        if checkpoint is None:
            return MemoryEstimate(encode=None, denoise=_dummy(walk, model), decode=None)
        load.silence_libraries()
        return MemoryEstimate(
            encode=_encode(walk, checkpoint, sampling),
            denoise=_denoise(walk, checkpoint, model, sampling),
            decode=_decode(walk, checkpoint, sampling),
        )


@torch.no_grad()
def bare_process_bytes() -> int:
    """Resident bytes of a process that has a rank's imports but no model.

    This process is measured, so import first what a rank imports. Each kind of kernel is used
    once, since the libraries' own code becomes resident only then: some 20 MiB.
    """
    DummyUNet()(torch.zeros(1, 4, 2, 8, 8), 0)
    batch = functional.conv2d(torch.zeros(16, 32, 8, 8), torch.zeros(32, 32, 3, 3))
    batch = functional.group_norm(batch, 4).flatten(2)
    functional.gelu(functional.linear(batch, torch.zeros(36, 36)))
    functional.scaled_dot_product_attention(batch, batch, batch)
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE")


# 1. The parts, each run by the code that a rank runs it with.


def _encode(walk: _Walk, checkpoint: Checkpoint, sampling: SamplingConfig) -> PartMemory:
    """CLIP at its fixed 224 x 224, then the VAE's encoder at the clip's size."""
    clip = walk.module("image_encoder", checkpoint)
    seen = torch.zeros(1, 3, 224, 224, dtype=walk.dtype)
    embedding = walk.measure([clip], lambda: clip(seen))
    vae = walk.module("vae", checkpoint, without=("decoder",))
    weight_bytes = _num_bytes([vae])
    upcast = walk.dtype == torch.float16 and bool(vae.config.force_upcast)
    if upcast:  # as models/encode.py does for the time of the encode
        vae = _Walk(torch.float32, on_cpu=walk.on_cpu).module(
            "vae", checkpoint, without=("decoder",)
        )
    pipe = _pipe(vae)
    pixels = torch.zeros(1, 3, sampling.height, sampling.width)
    encoded = walk.measure(
        [vae], lambda: pipe._encode_vae_image(pixels, torch.device("cpu"), 1, False)
    )
    return PartMemory(
        embedding.weight_bytes + weight_bytes,
        max(embedding.activation_bytes, encoded.peak_bytes - weight_bytes),
    )


def _denoise(
    walk: _Walk, checkpoint: Checkpoint, model: ModelConfig, sampling: SamplingConfig
) -> PartMemory:
    unet = walk.module("unet", checkpoint)
    if model.memory_opt:
        unet.enable_forward_chunking()
    channels, size = checkpoint.latent_channels, _latent_size(checkpoint, sampling)
    tensors = {
        IMAGE_LATENTS: torch.zeros(1, channels, *size, dtype=walk.dtype),
        IMAGE_EMBEDDING: torch.zeros(1, 1, checkpoint.cross_attention_dim, dtype=walk.dtype),
        ADDED_TIME_IDS: torch.zeros(1, 3, dtype=walk.dtype),
    }
    latent = torch.zeros(1, sampling.frames, channels, *size, dtype=walk.dtype)
    denoiser = SvdDenoiser(unet, load.new_scheduler(checkpoint), tensors, sampling, 0)
    return walk.measure([unet], lambda: denoiser.predict_noise(latent, 0))


def _decode(walk: _Walk, checkpoint: Checkpoint, sampling: SamplingConfig) -> PartMemory:
    vae = walk.module("vae", checkpoint, without=("encoder", "quant_conv"))
    pipe = _pipe(vae)
    channels, size = checkpoint.latent_channels, _latent_size(checkpoint, sampling)
    latent = torch.zeros(1, sampling.frames, channels, *size, dtype=walk.dtype)
    return walk.measure(
        [vae], lambda: pipe.decode_latents(latent, sampling.frames, sampling.decode_chunk_size)
    )


def _dummy(walk: _Walk, model: ModelConfig) -> PartMemory:
    latent = torch.zeros(model.dummy_latent.shape, dtype=walk.dtype)
    unet = DummyUNet(latent.shape[1]).to(walk.dtype)
    return walk.measure([unet], lambda: unet(latent, 0))


def _pipe(vae: Any) -> Any:
    """diffusers' own encode and decode, on a VAE."""
    from diffusers import StableVideoDiffusionPipeline  # it warns of torchvision on import

    return StableVideoDiffusionPipeline(
        vae=vae, image_encoder=None, unet=None, scheduler=None, feature_extractor=None
    )


def _latent_size(checkpoint: Checkpoint, sampling: SamplingConfig) -> tuple[int, int]:
    factor = checkpoint.vae_scale_factor
    return sampling.height // factor, sampling.width // factor


# 2. Walking without data, and counting.


class _Walk:
    """Builds modules without data, and runs them on tensors without elements.

    torch's fake tensors rather than meta ones: they choose kernels as CPU tensors do, so that
    attention is the one that never holds its whole matrix.
    """

    def __init__(self, dtype: torch.dtype, *, on_cpu: bool) -> None:
        self.dtype = dtype
        self.on_cpu = on_cpu
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def module(self, component: str, checkpoint: Checkpoint, without: tuple[str, ...] = ()) -> Any:
        """One component in `dtype`, without some of its submodules, as `load` leaves it."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self._fake:
                module = empty_module(component, checkpoint.folder / component)
        finally:
            torch.set_default_dtype(default)
        for name in without:
            delattr(module, name)
        return module.eval()

    @torch.no_grad()
    def measure(
        self, modules: Iterable[torch.nn.Module], forward: Callable[[], object]
    ) -> PartMemory:
        """The modules' bytes, and the most that `forward` holds beside them."""
        modules = list(modules)
        live = LiveBytes(_tensors(modules), count_workspace=self.on_cpu)
        with self._fake, live:
            forward()
        return PartMemory(_num_bytes(modules), live.peak)


def _tensors(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def _num_bytes(modules: Iterable[torch.nn.Module]) -> int:
    return sum(tensor.nbytes for tensor in _tensors(modules))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
