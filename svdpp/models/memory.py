"""The estimate of a model's memory and FLOPs from its configs; reads no weight.

Each part is built from fake tensors, which have a shape but no data, and runs the code of a rank,
while every storage that is created and freed is counted, and the FLOPs of every kernel. Of the
kernels' workspaces, only those of CPU convolutions are counted, because torch reports only which
convolution kernel it chooses.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.models.checkpoint import Checkpoint, package_of
from svdpp.models.dummy import DummyUNet
from svdpp.models.live_bytes import LiveBytes
from svdpp.models.loading import fp32_parameters, silence_libraries, torch_dtype
from svdpp.models.lora import lora_bytes
from svdpp.plan.layout import Roles


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


# torch registers its GPU kernels only; the sizes of the arguments are the same.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_attention_math: _attention_flops,
}


class PartMemory(NamedTuple):
    """Memory of one part on its device: the weights, and the peak of the activations above them."""

    weight_bytes: int
    activation_bytes: int
    flops: int = 0
    """Of one run: a clip's encode or decode, or one step. A multiply-add counts as two."""

    @property
    def peak_bytes(self) -> int:
        """Weights and activations together."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of each part of a model; None for a part that the model does not have."""

    encode: PartMemory | None
    """Image encoder and VAE encoder, at the clip's size; without the original photograph."""
    denoise: PartMemory
    """The denoiser, or one of two experts, for one step."""
    decode: PartMemory | None
    """The VAE decoder, for `decode_chunk_size` frames at a time."""

    def of_rank(self, roles: Roles) -> PartMemory:
        """Memory of a rank with these roles: the sum of the weights, the largest activations."""
        loaded = [
            part
            for name, has_role in roles.parts.items()
            if has_role and (part := getattr(self, name)) is not None
        ]
        other_experts = max(0, len(roles.experts) - 1)
        rank = joined(loaded) if loaded else PartMemory(0, 0)
        return rank._replace(
            weight_bytes=rank.weight_bytes + other_experts * self.denoise.weight_bytes
        )

    def as_costs(self) -> dict[str, float]:
        """The memory fields of `plan.costs.Costs` by name, in GiB; missing parts are omitted."""
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
    """Estimates the memory of each part of a model, in seconds and without its weights.

    Args:
        checkpoint: found and checked; None for the dummy model.
        model: its dtype is that of weights and latents.
        sampling: resolved, so that frame count and decode chunk are numbers.
        device: on `cpu`, the workspaces of convolutions count; on CUDA, those of cuDNN do not.
        num_threads: intra-op threads of a CPU rank, on which torch's choice of kernels depends.

    Raises:
        ModelError: the model's class rejects a config.
    """
    fake_run = FakeRun(torch_dtype(model.dtype), on_cpu=device == "cpu")
    with _threads(num_threads):
        if checkpoint is None:
            return MemoryEstimate(encode=None, denoise=_dummy(fake_run, model), decode=None)
        silence_libraries()
        family: Any = importlib.import_module(f"{package_of(checkpoint.family)}.memory")
        found: MemoryEstimate = family.estimate_parts(fake_run, checkpoint, model, sampling)
        with_loras = found.denoise.weight_bytes + lora_bytes(model)
        return replace(found, denoise=found.denoise._replace(weight_bytes=with_loras))


@torch.no_grad()
def bare_process_bytes() -> int:
    """Resident bytes of a rank's process without a model.

    It measures this process, which must already have imported what a rank imports. It runs each
    kind of kernel once, because the libraries' code becomes resident only then (about 20 MiB).
    """
    DummyUNet()(torch.zeros(1, 4, 2, 8, 8), 0)
    batch = functional.conv2d(torch.zeros(16, 32, 8, 8), torch.zeros(32, 32, 3, 3))
    batch = functional.group_norm(batch, 4).flatten(2)
    functional.gelu(functional.linear(batch, torch.zeros(36, 36)))
    functional.scaled_dot_product_attention(batch, batch, batch)
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE")


def _dummy(fake_run: FakeRun, model: ModelConfig) -> PartMemory:
    latent = torch.zeros(model.dummy_latent.shape, dtype=fake_run.dtype)
    unet = DummyUNet(latent.shape[1]).to(fake_run.dtype)
    return fake_run.measure([unet], lambda: unet(latent, 0))


class FakeRun:
    """Builds modules from fake tensors and measures their forward pass.

    Fake tensors choose kernels as CPU tensors do; meta tensors do not. That matters for attention,
    whose CPU kernel never stores the whole matrix.
    """

    def __init__(self, dtype: torch.dtype, *, on_cpu: bool) -> None:
        self.dtype = dtype
        self.on_cpu = on_cpu
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def module(
        self,
        new: Callable[[], Any],
        without: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> Any:
        """The module that `new` makes, without some submodules, in `dtype` or the run's own."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype or self.dtype)
        try:
            with self._fake:
                module = new()
                for name in fp32_parameters(module):
                    parameter = module.get_parameter(name)
                    parameter.data = parameter.data.float()
        finally:
            torch.set_default_dtype(default)
        for name in without:
            delattr(module, name)
        return module.eval()

    def fake(self, value: Any) -> Any:
        """A fake tensor like `value`; other values as they are."""
        return self._fake.from_tensor(value) if isinstance(value, torch.Tensor) else value

    @torch.no_grad()
    def measure(
        self, modules: Iterable[torch.nn.Module], forward: Callable[[], object]
    ) -> PartMemory:
        """Measures the modules' bytes, the peak of `forward` above them, and its FLOPs."""
        modules = list(modules)
        live = LiveBytes(_tensors(modules), count_workspace=self.on_cpu)
        counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        with self._fake, counter, live:
            forward()
        return PartMemory(num_bytes(modules), live.peak, counter.get_total_flops())


def joined(parts: Sequence[PartMemory]) -> PartMemory:
    """Parts that are loaded together and run one after the other."""
    return PartMemory(
        sum(part.weight_bytes for part in parts),
        max(part.activation_bytes for part in parts),
        sum(part.flops for part in parts),
    )


def _tensors(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def num_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """Bytes of the parameters and buffers of `modules`."""
    return sum(tensor.nbytes for tensor in _tensors(modules))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
