"""The estimate of a model's memory and FLOPs from its configs; reads no weight.

It runs the real encode, step and decode of a rank, with components made of fake tensors, which
have a shape but no data. A component's call runs on fake tensors too, and the pipeline gets zeros
of the shapes of its result. Meanwhile every storage that is created and freed is counted, and the
FLOPs of every kernel. Of the kernels' workspaces, only those of CPU convolutions are counted,
because torch reports only which convolution kernel it chooses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.errors import RequestError
from svdpp.models.base import DTYPES, Tensors
from svdpp.models.checkpoint import Checkpoint, has_weights
from svdpp.models.dummy import DummyUNet
from svdpp.models.engine.configs import first_line
from svdpp.models.engine.load import (
    apply_memory_options,
    component_class,
    dtype_of,
    new_pipeline,
    unused_parts,
)
from svdpp.models.engine.model import EngineModel, blank_source
from svdpp.models.engine.patches import component_methods, replaced
from svdpp.models.engine.values import Node, describe, zeros
from svdpp.models.hub import show_name
from svdpp.models.live_bytes import LiveBytes
from svdpp.models.loading import (
    fp32_parameters,
    load_processor,
    new_module,
    silence_libraries,
)
from svdpp.models.lora import lora_bytes
from svdpp.plan.layout import Roles


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
    """Encoders of text and image, and the VAE's, at the clip's size; without the original image."""
    denoise: PartMemory
    """The denoiser, or one of two experts, for one step."""
    decode: PartMemory | None
    """The VAE's decoder, for `decode_chunk_size` frames at a time."""

    def of_rank(self, roles: Roles) -> PartMemory:
        """Memory of a rank with these roles: the sum of the weights, the largest activations."""
        held = (getattr(self, name) for name, has_role in roles.parts.items() if has_role)
        loaded = [part for part in held if part is not None]
        other_experts = max(0, len(roles.experts) - 1)
        return PartMemory(
            sum(part.weight_bytes for part in loaded) + other_experts * self.denoise.weight_bytes,
            max((part.activation_bytes for part in loaded), default=0),
            sum(part.flops for part in loaded),
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
        checkpoint: None for the dummy model.
        model: its dtype is that of weights and latents.
        sampling: resolved, so that frame count and decode chunk are numbers.
        device: on `cpu`, the workspaces of convolutions count; on CUDA, those of cuDNN do not.
        num_threads: intra-op threads of a CPU rank, on which torch's choice of kernels depends.
    """
    on_cpu, before = device == "cpu", torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        if checkpoint is None:
            return MemoryEstimate(encode=None, denoise=_dummy(model, on_cpu), decode=None)
        hollow = _Hollow(checkpoint, model, sampling, on_cpu=on_cpu)
        packet, encode = hollow.encode()
        packet, denoise = hollow.denoise(packet)
        denoise = denoise._replace(weight_bytes=denoise.weight_bytes + lora_bytes(model))
        return MemoryEstimate(encode=encode, denoise=denoise, decode=hollow.decode(packet))
    except (IndexError, RuntimeError, ValueError) as error:
        # For example, a table of positions ends.
        size = f"{sampling.width}x{sampling.height} and {sampling.num_frames} frames"
        raise RequestError(
            f"model {show_name(model.name)} cannot make a clip of {size} ({first_line(error)})",
            "use another --height, --width or --frames",
        ) from error
    finally:
        torch.set_num_threads(before)


def probe_packet(
    checkpoint: Checkpoint, model: ModelConfig, sampling: SamplingConfig, *, has_stepped: bool
) -> Tensors:
    """A packet of zeros in host memory; see `VideoModel.probe_packet`."""
    hollow = _Hollow(checkpoint, model, sampling, on_cpu=True)
    packet, _ = hollow.encode()
    return hollow.denoise(packet)[0] if has_stepped else packet


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


@torch.no_grad()
def _dummy(model: ModelConfig, on_cpu: bool) -> PartMemory:
    latent = torch.zeros(model.dummy_latent.shape, dtype=DTYPES[model.dtype])
    unet = DummyUNet(latent.shape[1]).to(latent.dtype)
    counter = FlopCounterMode(display=False)
    live = LiveBytes([*_tensors(unet), latent], count_workspace=on_cpu)
    with FakeTensorMode(allow_non_fake_inputs=True), counter, live:
        unet(latent, 0)
    return PartMemory(num_bytes([unet]), live.above, counter.get_total_flops())


class _Hollow:
    """A model of fake components, all on the CPU.

    Fake tensors choose kernels as CPU tensors do; meta tensors do not. That matters for attention,
    whose CPU kernel never stores the whole matrix.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelConfig,
        sampling: SamplingConfig,
        *,
        on_cpu: bool,
    ) -> None:
        silence_libraries()
        self._checkpoint, self._sampling, self._on_cpu = checkpoint, sampling, on_cpu
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._inside, self._flops = False, 0
        # Peak, FLOPs and result of nested calls, by name and sizes.
        self._known: dict[tuple[Any, ...], tuple[int, int, Node]] = {}
        cpu, parts = torch.device("cpu"), {}
        for part, name in checkpoint.classes:
            cls = component_class(part, name)
            if has_weights(part):
                parts[part] = self._module(cls, part, dtype_of(checkpoint, part, model.dtype))
                apply_memory_options(checkpoint, part, parts[part], model)
            else:
                parts[part] = load_processor(checkpoint, part, cls)
        self._modules = {part: each for part, each in parts.items() if has_weights(part)}
        self._pipe = new_pipeline(checkpoint, sampling.from_image, parts, cpu)
        self._model = EngineModel(self._pipe, checkpoint, model.dtype, sampling)

    def encode(self) -> tuple[Tensors, PartMemory]:
        """A packet before the first step, and the memory of an encode."""
        source = blank_source(self._sampling, self._sampling.frames)
        prepared = {} if source is None else self._model.prepare(source)
        request = ClipRequest(seed=0, prompt="a cat" if self._checkpoint.row.takes_prompt else None)
        roles = Roles(encode=True, denoise=False, decode=False)
        return self._measured(roles, lambda: self._model.encode(prepared, request))

    def denoise(self, packet: Tensors) -> tuple[Tensors, PartMemory]:
        """The packet after the first step, and the memory of a step."""
        roles = Roles(encode=False, denoise=True, decode=False)
        step = partial(self._model.denoise, packet, 0, 1, lambda _, __: None)
        return self._measured(roles, step, packet)

    def decode(self, packet: Tensors) -> PartMemory:
        """The memory of a decode; `packet` is one after a step."""
        roles = Roles(encode=False, denoise=False, decode=True)
        decode = partial(self._model.decode_by, packet, lambda video, **_: video[:, :, :1])
        return self._measured(roles, decode, packet)[1]

    def _module(self, cls: Any, part: str, dtype: torch.dtype) -> Any:
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with self._fake:
                module = new_module(cls, self._checkpoint.folder / part)
                kept = set(fp32_parameters(module))
                for name, parameter in module.named_parameters():  # some are made in float32
                    parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
        finally:
            torch.set_default_dtype(default)
        return module.eval()

    def _measured(
        self, roles: Roles, work: Callable[[], Any], packet: Tensors | None = None
    ) -> tuple[Any, PartMemory]:
        """The result and the memory of `work`, on a rank with these roles."""
        removed = [
            (module, name, module._modules.pop(name))
            for part, module in self._modules.items()
            for name in module._modules.keys()
            & unused_parts(self._checkpoint, part, roles, self._sampling)
        ]
        loaded = self._checkpoint.components_of(roles, self._sampling)
        weights = num_bytes(self._modules[part] for part in loaded)
        tensors = [tensor for module in self._modules.values() for tensor in _tensors(module)]
        self._live, self._flops = LiveBytes(tensors, count_workspace=self._on_cpu), 0
        del tensors
        with ExitStack() as patches:
            for module in self._modules.values():
                patches.enter_context(self._replaced(module, component_methods(module)))
                patches.enter_context(replaced(module, to=partial(self._cast, module)))
            if (decode := getattr(self._pipe, "decode_latents", None)) is not None:
                patches.enter_context(self._replaced(self._pipe, {"decode_latents": decode}))
            with self._live:
                result = work()
        for module, name, child in removed:
            module._modules[name] = child
        received = sum(tensor.nbytes for tensor in (packet or {}).values())
        return result, PartMemory(weights, self._live.above + received, self._flops)

    def _replaced(self, target: Any, methods: Any) -> Any:
        # Pipelines inspect signatures.
        calls = {
            name: update_wrapper(partial(self._call, method), method)
            for name, method in methods.items()
        }
        return replaced(target, **calls)

    def _call(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return self._nested(real, args, kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._fake.from_tensor, (args, kwargs))
        self._counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        self._inside = True
        try:
            # Without `live` below the fake mode, where it would see temporary tensors by which fake
            # kernels find out shapes.
            with _disable_current_modes(), self._fake, self._counter, self._live:
                result = real(*args, **kwargs)
        finally:
            self._inside = False
        self._flops += self._counter.get_total_flops()
        return tree_map(_zeros_like, result)

    def _nested(self, real: Any, args: Any, kwargs: Any) -> Any:
        """A call inside another one, such as the decode of a chunk: equal ones are run once."""
        live, counter = self._live, self._counter
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        key = (real.__name__, *(each.shape for each in tensors))
        if key in self._known:
            peak, flops, result = self._known[key]
            live.peak = max(live.peak, live.now + peak)
            self._flops += flops
            return zeros(result, torch.device("cpu"))
        before, flops = live.peak, counter.get_total_flops()
        live.peak = start = live.now
        result = real(*args, **kwargs)
        peak, live.peak = live.peak - start, max(before, live.peak)
        self._known[key] = peak, counter.get_total_flops() - flops, describe(result)
        return result

    def _cast(self, module: Any, *, dtype: torch.dtype) -> Any:
        """`module.to`, which cannot swap fake weights."""
        with self._fake, self._live:
            for tensor in filter(torch.is_floating_point, _tensors(module)):
                tensor.data = tensor.data.to(dtype)
        return module


def _zeros_like(value: Any) -> Any:
    """A tensor, or a distribution of latents, in real memory; other values as they are."""
    if isinstance(value, DiagonalGaussianDistribution):
        return DiagonalGaussianDistribution(_zeros_like(value.parameters), value.deterministic)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


# torch registers its GPU kernels only; the sizes of the arguments are the same.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_attention_math: _attention_flops,
}


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def num_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """Bytes of the parameters and buffers of `modules`."""
    return sum(tensor.nbytes for module in modules for tensor in _tensors(module))
