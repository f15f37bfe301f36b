"""The estimate of memory, by the real call of the pipeline with components that are fake.

Each call of a component runs on fake tensors and is measured; the pipeline gets zeros of the shapes
of its result. So no family needs a formula. The same run makes a packet without an encode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch.utils._pytree import tree_map

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.errors import RequestError
from svdpp.models.base import Tensors
from svdpp.models.engine.call import component_methods, replaced
from svdpp.models.engine.checkpoint import RowCheckpoint, has_weights
from svdpp.models.engine.load import (
    Parts,
    component_class,
    dtype_of,
    load_processor,
    new_pipeline,
    unused_parts,
)
from svdpp.models.engine.model import EngineModel
from svdpp.models.loading import first_line, new_module
from svdpp.models.memory import FakeRun, MemoryEstimate, PartMemory, joined, num_bytes
from svdpp.plan.layout import Roles

_CPU = torch.device("cpu")
_REQUEST = ClipRequest(seed=0, prompt="a cat")


def estimate_parts(
    fake_run: FakeRun, checkpoint: RowCheckpoint, model: ModelConfig, sampling: SamplingConfig
) -> MemoryEstimate:
    """The memory of the model's parts; see `models.memory.estimate`."""
    hollow = _Hollow(fake_run, checkpoint, model, sampling)
    try:
        packet, encode = hollow.encode()
        packet, denoise = hollow.denoise(packet)
        return MemoryEstimate(encode=encode, denoise=denoise, decode=hollow.decode(packet))
    except (
        IndexError,
        RuntimeError,
        ValueError,
    ) as error:  # such as a table of positions that ends
        size = f"{sampling.width}x{sampling.height} and {sampling.num_frames} frames"
        raise RequestError(
            f"{checkpoint.label} cannot make a clip of {size} ({first_line(error)})",
            "use another --height, --width or --frames",
        ) from error


def probe_packet(
    checkpoint: RowCheckpoint, dtype: str, sampling: SamplingConfig, *, has_stepped: bool
) -> Tensors:
    """A packet of zeros in host memory; see `VideoModel.probe_packet`."""
    model = ModelConfig(name=checkpoint.name, dtype=dtype)  # type: ignore[arg-type]
    fake_run = FakeRun(dtype_of(checkpoint, "", dtype), on_cpu=True)
    hollow = _Hollow(fake_run, checkpoint, model, sampling)
    packet, _ = hollow.encode()
    return hollow.denoise(packet)[0] if has_stepped else packet


class _Hollow:
    """A model of fake components, all on the CPU, and what their calls have taken."""

    def __init__(
        self,
        fake_run: FakeRun,
        checkpoint: RowCheckpoint,
        model: ModelConfig,
        sampling: SamplingConfig,
    ) -> None:
        self._fake_run, self._checkpoint = fake_run, checkpoint
        assert isinstance(sampling, PromptedSampling)
        self._sampling, self._from_image = sampling, sampling.from_image
        parts: dict[str, Any] = {}
        for part, name in checkpoint.classes:
            cls, folder = component_class(part, name), checkpoint.folder / part
            if has_weights(part):
                dtype = dtype_of(checkpoint, part, model.dtype)
                parts[part] = fake_run.module(partial(new_module, cls, folder), dtype=dtype)
            else:
                parts[part] = load_processor(checkpoint, part, cls, _CPU)
        self._modules = {part: each for part, each in parts.items() if has_weights(part)}
        pipe = new_pipeline(checkpoint, self._from_image, parts, _CPU)
        self._model = EngineModel(
            Parts(
                pipe=pipe,
                checkpoint=checkpoint,
                device=_CPU,
                dtype=model.dtype,
                from_image=self._from_image,
            ),
            self._sampling,
        )
        self._calls: list[PartMemory] = []
        self._inside = False

    def encode(self) -> tuple[Tensors, PartMemory]:
        """A packet before the first step, and the memory of an encode."""
        _, height, width, _ = self._model.frames_shape
        image = Image.new("RGB", (width, height))
        prepared = self._model.prepare(image) if self._from_image else {}
        with self._measured():
            packet = self._model.encode(prepared, _REQUEST)
        return packet, self._part(Roles(encode=True, denoise=False, decode=False))

    def denoise(self, packet: Tensors) -> tuple[Tensors, PartMemory]:
        """The packet after the first step, and the memory of a step."""
        with self._measured():
            done = self._model.denoise(packet, 0, 1, lambda _, __: None)
        memory = self._part(Roles(encode=False, denoise=True, decode=False))
        # The call replays copies of what it received, and makes the next packet.
        packets = sum(each.nbytes for each in (*packet.values(), *done.values()))
        return done, memory._replace(activation_bytes=memory.activation_bytes + packets)

    def decode(self, packet: Tensors) -> PartMemory:
        """The memory of a decode; `packet` is one after a step."""
        with self._measured():
            self._model.decode_by(packet, lambda video, **_: video[:, :, :1])
        return self._part(Roles(encode=False, denoise=False, decode=True))

    def _part(self, roles: Roles) -> PartMemory:
        weights = 0
        for part in self._checkpoint.components_of(roles, self._sampling):
            module = self._modules[part]
            unused = unused_parts(self._checkpoint, part, roles, self._sampling)
            weights += num_bytes([module]) - num_bytes(getattr(module, each) for each in unused)
        return joined(self._calls)._replace(weight_bytes=weights)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Measures every call of a component while the context lasts."""
        self._calls = []
        with ExitStack() as patches:
            for module in self._modules.values():
                methods = {
                    name: partial(self._call, module, method)
                    for name, method in component_methods(module).items()
                }
                patches.enter_context(replaced(module, **methods))
            yield

    def _call(self, module: Any, real: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return real(*args, **kwargs)
        args, kwargs = tree_map(self._fake_run.fake, (args, kwargs))
        results: list[Any] = []
        self._inside = True
        try:
            call = self._fake_run.measure([module], lambda: results.append(real(*args, **kwargs)))
        finally:
            self._inside = False
        self._calls.append(call)
        return tree_map(_zeros_like, results[0])


def _zeros_like(value: Any) -> Any:
    """A tensor, or a distribution of latents, in real memory; other values as they are."""
    if isinstance(value, DiagonalGaussianDistribution):
        return DiagonalGaussianDistribution(_zeros_like(value.parameters), value.deterministic)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype)
