"""Estimate of a model's memory and FLOPs from the configs of a checkpoint, without weights.

The estimate runs the real code of encode, steps and decode. The components (denoiser, VAE,
encoders) compute with fake tensors, which have a shape but no data. The pipeline's own code, which
needs data, gets zeros in place of the components' results. During the run, the bytes of all tensors
and the FLOPs of all operations are counted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.errors import ModelError, RequestError, SvdppError, first_line, pluralize
from svdpp.models.base import PreparedInput, Tensors
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine import load
from svdpp.models.engine.attention import set_attention_backend
from svdpp.models.engine.factory import model_class
from svdpp.models.engine.gguf_denoisers import quantise_fake
from svdpp.models.engine.model import blank_input
from svdpp.models.engine.records import component_methods, patch_methods, tensors_in
from svdpp.models.engine.torchao_denoisers import quantise_fake_to_int8
from svdpp.models.files import (
    display_name,
    has_weights,
    library_errors,
    read_safetensors_header,
)
from svdpp.models.gguf_files import find_denoisers
from svdpp.models.lora_files import lora_bytes
from svdpp.models.memory_tracker import MemoryTracker
from svdpp.plan.costs import MemoryEstimate, PartFlops, PartMemory
from svdpp.plan.roles import Roles


def estimate(
    checkpoint: Checkpoint,
    model: ModelConfig,
    sampling: SamplingConfig,
    *,
    device: str,
    num_threads: int = 1,
) -> MemoryEstimate:
    """Estimate the memory of encode, steps and decode of a model, by runs on fake tensors.

    The estimate takes some seconds of one CPU core. It changes none of torch's global settings, so
    other threads can use torch meanwhile.

    Args:
        checkpoint: Checked checkpoint. Only its configs are read, and the headers of those weight
            files that are on this machine.
        model: Model that the checkpoint belongs to.
        sampling: Resolved sampling parameters.
        device: `cpu`, or a CUDA device. Temporary memory of kernels is counted only for `cpu`.
        num_threads: Number of intra-op threads of a rank on a CPU. torch may choose other kernels
            for one thread than for several.

    Returns:
        Bytes of weights and peak bytes of activations, for encode, steps and decode.

    Raises:
        RequestError: The model cannot make a clip of this size.
        ModelError: A component cannot be created from its config, or the config does not fit the
            weight files.
    """
    workspace_threads = num_threads if device == "cpu" else None
    with _size_errors(model, sampling):
        fake_model = FakeModel(checkpoint, model, sampling, workspace_threads=workspace_threads)
        packet, encode = fake_model.encode()
        packet, denoise = fake_model.denoise(packet)
        denoise = denoise._replace(weight_bytes=denoise.weight_bytes + lora_bytes(model))
        return MemoryEstimate(encode=encode, denoise=denoise, decode=fake_model.decode(packet))


@contextmanager
def _size_errors(model: ModelConfig, sampling: SamplingConfig) -> Iterator[None]:
    """Turn errors of diffusers in the `with` block into a `RequestError` about the clip's size."""
    try:
        yield
    except SvdppError:  # passes unchanged, though it may also be a ValueError
        raise
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        # Configs and weights are checked elsewhere, so the likely cause is the clip's size: for
        # example, the model's table of position embeddings is too short for the clip.
        problem = first_line(error)
        if isinstance(error, AssertionError) and not str(error):
            problem = str(traceback.extract_tb(error.__traceback__)[-1].line)
        frames = pluralize(sampling.frames, "frame")
        size = f"{sampling.width}x{sampling.height} and {frames}"
        raise RequestError(
            f"model {display_name(model.name)} cannot make a clip of {size} ({problem})",
            "use another `height` or `width`, or use another `num_frames`",
            details={
                "width": sampling.width,
                "height": sampling.height,
                "frames": sampling.num_frames,
                "problem": problem,
            },
        ) from error


def count_flops(checkpoint: Checkpoint, model: ModelConfig, sampling: SamplingConfig) -> PartFlops:
    """Count the FLOPs of a clip's encode, of one step, and of the decode.

    The model's real code runs on fake tensors for some seconds, and torch's formulas give the FLOPs
    of each operation: 2 for each multiply-add of a matrix product, convolution or attention, 0 for
    all other operations. Usually two of the clip's steps run; the FLOPs of one step are their mean.
    Other threads may use torch during the call.

    Args:
        checkpoint: Checked checkpoint. Only its configs are read, and the headers of those weight
            files that are on this machine.
        model: Model that the checkpoint belongs to.
        sampling: Resolved sampling parameters.

    Raises:
        RequestError: The model cannot make a clip of this size.
        ModelError: A component cannot be created from its config, or the config does not fit the
            weight files.
    """
    with _size_errors(model, sampling):
        fake_model = FakeModel(checkpoint, model, sampling, counts_flops=True)
        packet, _ = fake_model.encode()
        encode = fake_model.flops
        packet, _ = fake_model.denoise(packet)
        step = fake_model.flops // fake_model.num_steps
        fake_model.decode(packet)
        return PartFlops(encode, step, fake_model.flops)


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))


#: diffusers' name of the attention backend that stores the whole matrix of attention weights. As it
#: needs much more memory than the others, an estimate uses it if the user has chosen it. For all
#: other backends, an estimate uses the default backend.
_MATH = "_native_math"
#: FLOP formula of the attention kernel on CPUs. torch has formulas only for kernels on GPUs.
CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


class FlopCounter(TorchDispatchMode):
    """Counter of FLOPs with the formulas of torch's `FlopCounterMode`.

    It replaces `FlopCounterMode`, whose global module hooks would also run in other threads.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula: Any = self._formulas.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


class _ConstructionMode(TorchFunctionMode):
    """Torch mode of one thread, in which modules with fake weights are built in a given dtype.

    `torch.set_default_dtype` would change the default dtype of all threads. Instead, this mode
    converts each result that has torch's default dtype, such as a new tensor or a quotient of
    integers, to the given dtype. A result is not converted if the call names a dtype, or if an
    argument already has the default dtype.

    Fake weights have no data. So an `if` on their values always takes the false branch.
    Constructors use such conditions only to decide whether they draw initial weights again.
    """

    _CONVERSIONS = frozenset({torch.Tensor.float, torch.Tensor.to, torch.Tensor.type})

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._default = dtype, torch.get_default_dtype()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.Tensor.__bool__:
                raise
            return False
        if not isinstance(result, torch.Tensor) or result.dtype != self._default:
            return result
        given = tree_flatten((args, kwargs))[0]
        named = any(
            isinstance(each, torch.dtype) or getattr(each, "dtype", None) == self._default
            for each in given
        )
        return result if named or func in self._CONVERSIONS else result.to(self._dtype)


def _weights(module: torch.nn.Module, without: Sequence[str] = ()) -> list[torch.Tensor]:
    """Return all parameters and buffers of a module, except those of submodules in `without`.

    A weight that TorchAO has quantised is replaced by its inner tensors, such as data and scale.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    weights: list[torch.Tensor] = []
    for name, tensor in named:
        if name.split(".")[0] in without:
            continue
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            weights.append(tensor)
        else:
            weights += [getattr(tensor, each) for each in flatten()[0]]
    return weights


def _check_weights(checkpoint: Checkpoint, part: str, module: torch.nn.Module) -> None:
    """Check that a component's config and its weight files agree on the shapes of the weights.

    Without this check, the run on fake tensors would fail in some operation, and `_size_errors`
    would report that the clip has the wrong size. Weights that have not been downloaded, or that
    the library renames, are not compared.

    Raises:
        ModelError: A weight in a file does not have the shape that the config describes.
    """
    try:
        paths = checkpoint.weight_files(part)
    except ModelError:
        return
    shapes = {name: list(each.shape) for name, each in module.named_parameters()}
    for path in paths:
        for name, entry in read_safetensors_header(path)[1].items():
            name = name.replace("._weight_qdata", ".weight")  # int8 weights of TorchAO
            if (expected := shapes.get(name, entry["shape"])) != entry["shape"]:
                raise ModelError(
                    f"{part}/config.json does not describe the weights: {name} has the shape "
                    f"{entry['shape']} in {path.name}, but the config says {expected}",
                    "download the checkpoint again: a key of the config may be missing",
                    details={
                        "component": part,
                        "tensor": name,
                        "shape": entry["shape"],
                        "config_shape": expected,
                    },
                )


class FakeModel:
    """Model with fake weights, which measures memory and FLOPs of encode, steps and decode.

    The weights are fake CPU tensors, not meta tensors, because torch chooses the kernels of the CPU
    only for CPU tensors. The choice matters for the memory of attention: the CPU's attention kernel
    never stores the whole matrix of attention weights.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelConfig,
        sampling: SamplingConfig,
        *,
        workspace_threads: int | None = None,
        counts_flops: bool = False,
    ) -> None:
        load.silence_libraries()
        self._checkpoint, self._sampling = checkpoint, sampling
        self._workspace_threads = workspace_threads
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._tracker = MemoryTracker((), workspace_threads)
        self._inside = False
        self.flops = 0
        """FLOPs of the last encode, steps or decode that was measured; 0 if FLOPs are not
        counted."""
        self._counts_flops = counts_flops
        # Peak bytes, FLOPs and result of each measured call, by component, method and input shapes.
        # Equal calls, such as those for the two guidance branches, are measured once.
        self._known: dict[Any, tuple[int, int, Any]] = {}
        parts = {}
        self._files = {file.part: file for file in find_denoisers(model, are_hashed=False)}
        for part, name in checkpoint.classes:
            cls = load.component_class(part, name)
            if has_weights(part):
                with library_errors(part, checkpoint):
                    dtype = load.component_dtype(checkpoint, part, model.dtype)
                    parts[part] = self._module(cls, part, dtype)
                    if part in self._files:
                        quantise_fake(parts[part], self._files[part], dtype, self._fake)
                    else:
                        _check_weights(checkpoint, part, parts[part])
                    if part in checkpoint.int8_denoisers:
                        quantise_fake_to_int8(parts[part], dtype, self._fake)
                load.apply_memory_options(checkpoint, part, parts[part], model)
                if model.attention_backend == _MATH and part in checkpoint.spec.denoisers:
                    set_attention_backend(parts[part], _MATH)
            else:
                parts[part] = load.load_processor(checkpoint, part, cls)
        self._modules = {part: each for part, each in parts.items() if has_weights(part)}
        self._pipe = load.build_pipeline(
            checkpoint, sampling.from_image, parts, torch.device("cpu")
        )
        kind = model_class(checkpoint.spec)
        self._model = kind(self._pipe, checkpoint, sampling, model.dtype)

    @property
    def num_steps(self) -> int:
        """Number of steps that an estimate runs: usually two, sometimes all.

        One step is too few, because the second step needs more memory than the first. All steps are
        run in two cases. If the model has two experts and is quantised, the experts can differ in
        quantisation, so the steps of both are measured. If the pipeline is modular, its decode
        needs the state after the last step.
        """
        steps = self._sampling.num_inference_steps
        are_quantised = self._files or self._checkpoint.int8_denoisers
        differ = bool(are_quantised) and self._checkpoint.num_experts == 2
        is_modular = self._checkpoint.spec.modular is not None
        return steps if differ or is_modular else min(2, steps)

    def encode(self) -> tuple[Tensors, PartMemory]:
        """Run a clip's encode on fake weights; return the clip's packet and the encode's memory.

        The packet has the tensors that one rank sends to the next: the state of the clip.
        """
        source = blank_input(self._sampling, whole=True)
        prepared: PreparedInput = {} if source is None else self._model.prepare(source)
        request = ClipRequest(
            seed=0, prompt="a cat" if self._checkpoint.spec.takes_prompt else None
        )
        roles = Roles(encode=True, denoise=False, decode=False)
        return self._measured(roles, prepared, lambda: self._model.encode(prepared, request))

    def denoise(self, packet: Tensors) -> tuple[Tensors, PartMemory]:
        """Run `num_steps` steps on fake weights; return the new packet and the steps' memory.

        If the model has two experts, the weights that are counted are those of the larger expert.
        """
        roles = Roles(encode=False, denoise=True, decode=False)
        steps = partial(self._model.denoise, packet, 0, self.num_steps, lambda _, __: None)
        result, memory = self._measured(roles, packet, steps)
        experts = self._modules.keys() & {*self._checkpoint.spec.denoisers}
        sizes = [sum(each.nbytes for each in _weights(self._modules[part])) for part in experts]
        return result, memory._replace(weight_bytes=max(memory.weight_bytes, *sizes))

    def decode(self, packet: Tensors) -> PartMemory:
        """Run the decode of a clip's packet on fake weights, and return the decode's memory."""
        roles = Roles(encode=False, denoise=False, decode=True)
        decode = partial(self._model.decode_with, packet, lambda video, **_: video[:, :, :1])
        return self._measured(roles, packet, decode)[1]

    def _module(self, cls: Any, part: str, dtype: torch.dtype) -> Any:
        with self._fake, _ConstructionMode(dtype):
            module = load.build_module(cls, self._checkpoint.component_folder(part).path)
        kept = set(load.fp32_parameters(module, dtype))
        with self._fake:
            # Some constructors name float32 explicitly, so convert their parameters here.
            for name, parameter in module.named_parameters():
                parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
        return module.eval()

    def _measured(
        self, roles: Roles, received: PreparedInput, work: Callable[[], Any]
    ) -> tuple[Any, PartMemory]:
        """Run the encode, steps or the decode on fake weights; return the result and the memory.

        Args:
            roles: Roles of a rank that does only this work. Only the weights that these roles need
                are counted.
            received: Tensors that the rank holds before `work`: a clip's packet or the prepared
                image. Their bytes count as activations.
            work: Function that runs the encode, steps or the decode.
        """
        weights_of = {
            part: _weights(
                module, load.unused_submodules(self._checkpoint, part, roles, self._sampling)
            )
            for part, module in self._modules.items()
        }
        loaded = self._checkpoint.weighted_components_of(roles, self._sampling)
        weights = sum(tensor.nbytes for part in loaded for tensor in weights_of[part])
        self._tracker = MemoryTracker(chain(*weights_of.values()), self._workspace_threads)
        for tensor in tensors_in(received):
            self._tracker.add(tensor)
        self.flops = 0
        with ExitStack() as patches:
            for part, module in self._modules.items():
                # Pipelines inspect the signatures of these methods; `update_wrapper` keeps them.
                methods = {
                    name: update_wrapper(partial(self._call, part, method), method)
                    for name, method in component_methods(module).items()
                }
                to = partial(self._cast, weights_of[part], module)
                patches.enter_context(patch_methods(module, **methods, to=to))
            with self._tracker:
                result = work()
        return result, PartMemory(weights, self._tracker.peak_above_start)

    def _call(self, part: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        """Measure a component's method on fake tensors, and return zeros in place of its result.

        The zeros are real CPU tensors with the result's shapes and dtypes. Calls with inputs of the
        same shapes are measured once.
        """
        if self._inside:
            return real(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        inputs = (each.shape if isinstance(each, torch.Tensor) else repr(each) for each in leaves)
        key = part, real.__name__, str(spec), *inputs
        if key not in self._known:
            self._known[key] = self._run(self._modules[part], real, args, kwargs)
        peak, flops, result = self._known[key]
        self.flops += flops
        self._tracker.peak = max(self._tracker.peak, self._tracker.current + peak)
        return tree_map(partial(_zeros_on, "cpu"), result)

    def _run(self, module: Any, real: Any, args: Any, kwargs: Any) -> tuple[int, int, Any]:
        """Call a component's method on fake tensors; return peak bytes, FLOPs and the result.

        The tensors of the result are on the meta device.
        """
        self._inside = True
        try:
            with _disable_current_modes(), self._fake, ExitStack() as modes:
                args, kwargs = tree_map_only(torch.Tensor, self._fake.from_tensor, (args, kwargs))
                known = *_weights(module), *tensors_in((args, kwargs))
                counter = FlopCounter()
                if self._counts_flops:
                    modes.enter_context(counter)
                # To derive the shape of a result, fake kernels create temporary tensors, which must
                # not be counted. The tracker does not see them, because it is entered after the
                # fake mode.
                with MemoryTracker(known, self._workspace_threads) as tracker, ExitStack() as tiles:
                    if self._checkpoint.spec.decodes_in_tiles and is_tiled(module):
                        for half in (module.encoder, module.decoder):
                            forward = _RepeatedTiles(half.forward, tracker, counter)
                            tiles.enter_context(patch_methods(half, forward=forward))
                    result = real(*args, **kwargs)
                return (
                    tracker.peak_above_start,
                    counter.total,
                    tree_map(partial(_zeros_on, "meta"), result),
                )
        finally:
            self._inside = False

    def _cast(self, weights: Sequence[torch.Tensor], module: Any, *, dtype: torch.dtype) -> Any:
        """Convert the dtype of fake weights; `module.to` cannot convert fake tensors."""
        with self._fake, self._tracker:
            for tensor in filter(torch.is_floating_point, weights):
                tensor.data = tensor.data.to(dtype)
        return module


def is_tiled(module: Any) -> bool:
    """Whether a module is a VAE whose tiling is enabled."""
    return bool(getattr(module, "use_tiling", False))


class _RepeatedTiles:
    """Replacement of a VAE encoder's or decoder's `forward` that measures each tile size once.

    For Wan, a call on fake tensors takes half a second of CPU time, and a clip has hundreds of
    calls. Wan calls its encoder or decoder once for each frame of a tile's latent, with a new cache
    for each tile. From the third frame of a tile on, all calls take the same memory. So two calls
    are equal if their inputs have the same shape, and if both are the first, the second, or a later
    call of their tile. Of equal calls, only the first is measured.

    Args:
        forward: The module's own `forward`.
        tracker: Tracker of the memory of all calls.
        counter: Counter of the FLOPs of all calls.
    """

    _STEADY = 2

    def __init__(
        self, forward: Callable[..., torch.Tensor], tracker: MemoryTracker, counter: FlopCounter
    ) -> None:
        self._forward, self._tracker, self._counter = forward, tracker, counter
        # Measured calls, by shape of the input and number of the call in its tile (0, 1, or 2 for
        # all later calls). A value has the peak bytes above `_base`, the FLOPs, and the result's
        # shape and dtype. `_base` is the number of bytes before the tile, plus those of the results
        # of the tile's earlier calls.
        self._known: dict[Any, tuple[int, int, torch.Size, torch.dtype]] = {}
        self._cache: Any = None
        self._call, self._base = 0, 0

    def __call__(self, tile: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Measure a VAE's call on a tile, unless an equal call was measured before.

        Returns:
            Uninitialised tensor with the shape and dtype of the call's result.
        """
        tracker, cache = self._tracker, kwargs.get("feat_cache")
        if cache is None or cache is not self._cache:
            self._cache = cache  # the assignment frees the cache of the previous tile
            self._call, self._base = 0, tracker.current
        key = tile.shape, min(self._call, self._STEADY)
        self._call += 1
        if key not in self._known:
            self._known[key] = self._measured(tile, *args, **kwargs)
        else:
            self._counter.total += self._known[key][1]
        peak, _, shape, dtype = self._known[key]
        result = torch.empty(shape, dtype=dtype, device=tile.device)
        tracker.peak = max(tracker.peak, self._base + peak)
        self._base += result.nbytes
        return result

    def _measured(
        self, tile: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[int, int, torch.Size, torch.dtype]:
        tracker, flops = self._tracker, self._counter.total
        highest, tracker.peak = tracker.peak, tracker.current
        result = self._forward(tile, *args, **kwargs)
        peak, tracker.peak = tracker.peak, max(highest, tracker.peak)
        return peak - self._base, self._counter.total - flops, result.shape, result.dtype


def _zeros_on(device: str, value: Any) -> Any:
    """Return zeros on a device for a tensor, plain values unchanged, and None for other objects."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    return value if isinstance(value, (bool, int, float, str)) else None
