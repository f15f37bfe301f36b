"""Loader of LoRAs into a pipeline through diffusers, with a check of each tensor.

diffusers renames the tensors of a file, scales or drops some tensors, and only warns if a
tensor fits no weight of the model. So this module runs diffusers' conversion a second time, with
tensors that remember their names in the file, and checks that the loaded model has exactly the
converted tensors.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import diffusers
import torch
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from svdpp.config import Lora
from svdpp.errors import ModelError
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.records import patch_methods
from svdpp.models.files import display_name, library_errors, short_repr
from svdpp.models.lora_files import (
    CLIP_LORAS_KEPT,
    OTHER_MODEL_HINT,
    LoraFile,
    find_lora,
    ignored_tensors,
)

#: Key of a loaded adapter: the LoRA, and a number, which is usually 0. If the model and the clip
#: together name one LoRA several times, the numbers are 0, 1, and so on. The weight of the LoRA in
#: the key is always 1, because one adapter serves clips that use the LoRA with different weights.
_Key = tuple[Lora, int]


class PipelineLoras:
    """LoRAs of one loaded pipeline: the model's LoRAs, and the LoRAs of the current clip.

    LoRAs of earlier clips stay loaded, because later clips may use them again. If a denoiser has
    more than `CLIP_LORAS_KEPT` LoRAs of clips, those that the current clip does not use are
    unloaded, oldest first. Skeletons (denoisers without weights, because other ranks run them) get
    no LoRAs.

    Args:
        pipe: Pipeline of diffusers, whose denoisers may be skeletons.
        checkpoint: Checked checkpoint with the model's LoRAs, which the constructor loads.
        local_files_only: Whether LoRAs of clips are only read from this machine, not downloaded.

    Raises:
        ModelError: A file has a tensor that fits no weight of the model, or lacks a tensor of the
            adapter.
    """

    def __init__(self, pipe: Any, checkpoint: Checkpoint, *, local_files_only: bool = True) -> None:
        self._pipe, self._checkpoint = pipe, checkpoint
        self._local_files_only = local_files_only
        self._active: tuple[Lora, ...] = ()
        self._num_loaded = 0
        # Names of the loaded adapters by key. In `_clip_adapters`, the adapter that was used last
        # is at the end, because adapters at the beginning are unloaded first.
        self._model_adapters: dict[_Key, str] = {}
        self._clip_adapters: dict[_Key, str] = {}
        # For each denoiser that has ever had a LoRA: the denoiser's parameters and their original
        # requires_grad.
        self._required_grad: dict[str, list[tuple[torch.nn.Parameter, bool]]] = {}
        files = {file.lora: file for file in checkpoint.loras}
        self._model_loras = tuple(file.lora for file in checkpoint.loras)
        for key, lora in _keys(self._model_loras):
            if self._holds(lora.part):
                self._model_adapters[key] = self._load(files[lora])
        self._set_adapters()

    def activate(self, loras: tuple[Lora, ...]) -> None:
        """Load the LoRAs that are not loaded yet, and activate the model's and the clip's LoRAs.

        Args:
            loras: LoRAs of the clip whose steps follow.

        Raises:
            ModelError: A file is missing, damaged or has changed, or does not fit the model.
        """
        if loras == self._active:
            return
        keys = _keys((*self._model_loras, *loras))[len(self._model_loras) :]
        for key, lora in keys:
            if not self._holds(lora.part):
                continue
            name = self._clip_adapters.pop(key, None)
            if name is None:
                name = self._load(self._find(lora))
            self._clip_adapters[key] = name
        self._unload_oldest({key for key, _ in keys})
        self._active = loras
        self._set_adapters()

    def _holds(self, part: str) -> bool:
        return not getattr(getattr(self._pipe, part), "is_skeleton", False)

    def _find(self, lora: Lora) -> LoraFile:
        return find_lora(lora, local_files_only=self._local_files_only, checkpoint=self._checkpoint)

    def _load(self, file: LoraFile) -> str:
        """Load a LoRA as a new adapter of its denoiser, and return the adapter's name."""
        name = f"lora{self._num_loaded}"
        denoiser = getattr(self._pipe, file.part)
        if file.part not in self._required_grad:
            parameters = [(each, each.requires_grad) for each in denoiser.parameters()]
            self._required_grad[file.part] = parameters
        with (
            warnings.catch_warnings(action="ignore"),
            _lora_errors(file, self._checkpoint),
            _without_skeletons(self._pipe),
        ):
            _load(self._pipe, self._checkpoint, file, name)
        self._num_loaded += 1
        return name

    def _unload_oldest(self, needed: set[_Key]) -> None:
        for part in self._required_grad:
            loaded = [key for key in self._clip_adapters if key[0].part == part]
            excess = max(0, len(loaded) - CLIP_LORAS_KEPT)
            for key in [key for key in loaded if key not in needed][:excess]:
                getattr(self._pipe, part).delete_adapters([self._clip_adapters.pop(key)])

    def _set_adapters(self) -> None:
        """Activate the adapters of the model and the clip, each with the weight of its LoRA."""
        adapters = self._model_adapters | self._clip_adapters
        keys = _keys((*self._model_loras, *self._active))
        for part, parameters in self._required_grad.items():
            used = [(adapters[key], lora.weight) for key, lora in keys if lora.part == part]
            names, weights = [name for name, _ in used], [weight for _, weight in used]
            getattr(self._pipe, part).set_adapters(names, weights)
            # peft sets requires_grad to False when the first LoRA is loaded. Restore the original
            # value for clips without LoRAs: torch's choice of kernels depends on it, and the
            # results of other kernels differ in some bits.
            for parameter, required_grad in parameters:
                parameter.requires_grad_(required_grad and not names)


def _keys(loras: tuple[Lora, ...]) -> list[tuple[_Key, Lora]]:
    """Return (key, LoRA) pairs. A LoRA that occurs twice gets two keys, and is loaded twice."""
    counts: Counter[Lora] = Counter()
    keys = []
    for lora in loras:
        keys.append(((lora.source, counts[lora.source]), lora))
        counts[lora.source] += 1
    return keys


@contextmanager
def _lora_errors(file: LoraFile, checkpoint: Checkpoint) -> Iterator[None]:
    """Add the name of a LoRA to errors that the `with` block raises."""
    label = f"the LoRA {display_name(file.lora.name)}"
    with library_errors(label, checkpoint):
        try:
            yield
        except ModelError as error:
            message = f"{label}: {error.message}"
            raise ModelError(message, error.hint, details=error.details) from error


@contextmanager
def _without_skeletons(pipe: Any) -> Iterator[None]:
    """Keep diffusers from loading LoRAs into skeletons, which are denoisers without weights."""
    with ExitStack() as patches:
        for part in pipe._lora_loadable_modules:
            module = getattr(pipe, part, None)
            if getattr(module, "is_skeleton", False):
                patches.enter_context(
                    patch_methods(module, load_lora_adapter=lambda *_, **__: None)
                )
        yield


def check_loras_fit(files: Iterable[LoraFile], checkpoint: Checkpoint) -> None:
    """Check the names and shapes of LoRA tensors against the configs of the denoisers.

    This works without the weights of the denoisers. When a rank loads the LoRA, it repeats the
    check, and also compares the tensors that peft has loaded with those of the file.

    Args:
        files: Checked files of LoRAs.
        checkpoint: Checkpoint with the denoisers.

    Raises:
        ModelError: A tensor fits no weight of the denoiser, by name or by shape.
    """
    cls = getattr(diffusers, checkpoint.spec.pipeline(checkpoint.image_use == "needed"))
    classes, denoisers = dict(checkpoint.classes), dict[str, Any]()
    for file in files:
        with _lora_errors(file, checkpoint):
            if file.part not in denoisers:
                with torch.device("meta"):
                    kind = getattr(diffusers, classes[file.part])
                    config = kind.load_config(checkpoint.folder / file.part, local_files_only=True)
                    denoisers[file.part] = kind.from_config(config)
            denoiser = denoisers[file.part]
            ignored = frozenset(ignored_tensors(file.path, checkpoint))
            given = _converted(cls, denoiser, file, ignored)
            _check_shapes(denoiser, given, file)
            _check_places(denoiser, given, ignored)


def _load(pipe: Any, checkpoint: Checkpoint, file: LoraFile, name: str) -> None:
    denoiser = getattr(pipe, file.part)
    ignored = frozenset(ignored_tensors(file.path, checkpoint))
    given = _converted(pipe, pipe.transformer, file, ignored)
    _check_shapes(denoiser, given, file)
    expert = {"load_into_transformer_2": True} if file.part == "transformer_2" else {}
    pipe.load_lora_weights(
        str(file.path.parent),
        adapter_name=name,
        weight_name=file.path.name,
        local_files_only=True,
        use_safetensors=True,
        **expert,
    )
    _check_loaded(denoiser, given, ignored, name)


class _Traced(torch.Tensor):
    """Tensor that remembers from which tensors of a LoRA file it was computed."""

    sources: frozenset[str] = frozenset()
    """Names of the tensors in the file from which this tensor was computed."""
    read: set[str]
    """Names of the tensors in the file that diffusers has read as Python numbers, such as `alpha`.
    Numbers have no `sources`, so this set shows that diffusers has used these tensors. All tensors
    of the file share one set."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        base: Any = super()
        result = base.__torch_function__(func, types, args, kwargs or {})
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, _Traced) and each.sources:
                if isinstance(result, _Traced):
                    result.sources, result.read = result.sources | each.sources, each.read
                elif func is torch.Tensor.item:
                    each.read |= each.sources
        return result


def _converted(
    pipe: Any, transformer: Any, file: LoraFile, ignored: frozenset[str]
) -> dict[str, _Traced]:
    """Convert the tensors of a LoRA as diffusers does, and return them by their new names.

    Args:
        pipe: Pipeline or pipeline class, whose methods convert LoRAs.
        transformer: First denoiser of the pipeline. If it is an image-to-video model, diffusers
            adds zeros to a text-to-video LoRA, for the weights that such a LoRA lacks.
        file: File of the LoRA.
        ignored: Names of the tensors in the file that the conversion may drop.

    Raises:
        ModelError: The conversion drops a tensor of the file, or renames it for another component.
    """
    read: set[str] = set()
    traced: dict[str, _Traced] = {}
    for name, tensor in load_file(file.path).items():
        each = traced[name] = tensor.as_subclass(_Traced)
        each.sources, each.read = frozenset([name]), read
    converted: dict[str, Any] = pipe.lora_state_dict(dict(traced))
    # Add zeros for tensors that a text-to-video LoRA lacks, as diffusers does when it loads a LoRA.
    if expand := getattr(pipe, "_maybe_expand_t2v_lora_for_i2v", None):
        converted = expand(transformer=transformer, state_dict=converted)
    prefix = "transformer."
    given = {
        key.removeprefix(prefix): each for key, each in converted.items() if key.startswith(prefix)
    }
    # Names without `lora_A` are in an older format. diffusers' `load_lora_adapter` converts them to
    # peft's names under the same condition.
    if given and "lora_A" not in next(iter(given)):
        given = convert_unet_state_dict_to_peft(given)
    used = read.union(*(each.sources for each in given.values()))
    if dropped := sorted(traced.keys() - used - ignored):
        _refuse(f"diffusers has no use for {short_repr(dropped[0])}", dropped)
    return given


def _check_shapes(denoiser: Any, given: Mapping[str, _Traced], file: LoraFile) -> None:
    """Check that a LoRA's factors A and B fit the shapes of the weights that they change.

    Raises:
        ModelError: A factor has a shape that does not fit.
    """
    for key, factor in given.items():
        path, _, factor_name = key.partition(".lora_")
        is_first = factor_name.startswith("A")
        try:
            module = denoiser.get_submodule(path)
        except AttributeError:
            continue  # `_check_places` or `_check_loaded` rejects modules that the denoiser lacks
        weight = getattr(getattr(module, "base_layer", module), "weight", None)
        if weight is None or factor.dim() < 2 or not key.endswith(".weight"):
            continue
        # For a weight from a GGUF file, `shape` counts bytes; `quant_shape` is the real shape.
        weight_shape = getattr(weight, "quant_shape", weight.shape)
        expected = weight_shape[1] if is_first else weight_shape[0]
        if factor.shape[1 if is_first else 0] != expected:
            shapes = [list(factor.shape), list(weight_shape)]
            raise ModelError(
                f"the tensor {_names(factor.sources)} of shape {shapes[0]} does not fit the weight "
                f"{path} of shape {shapes[1]}",
                f"use a LoRA for this model; {display_name(file.path.name)} is for another model",
                details={
                    "tensor": sorted(factor.sources),
                    "shape": shapes[0],
                    "weight": path,
                    "weight_shape": shapes[1],
                },
            )


def _check_places(denoiser: Any, given: Mapping[str, _Traced], ignored: frozenset[str]) -> None:
    """Check that each factor (A or B) of a LoRA belongs to a module of the denoiser.

    Raises:
        ModelError: The denoiser lacks the module, or no factor is for this denoiser.
    """
    kind, modules = type(denoiser).__name__, {name for name, _ in denoiser.named_modules()}
    others = [key for key in given if key.partition(".lora_")[0] not in modules]
    if strange := sorted(key for key in others if not given[key].sources <= ignored):
        _refuse(f"{short_repr(strange[0])} is not in a {kind}", strange)
    if len(others) == len(given):
        raise ModelError(f"no tensor of the file is for a {kind}", OTHER_MODEL_HINT)


def _check_loaded(
    denoiser: Any, given: Mapping[str, _Traced], ignored: frozenset[str], name: str
) -> None:
    """Check that a LoRA's loaded adapter has exactly the tensors of the LoRA file.

    If the file lacked a tensor of the adapter, this tensor would be uninitialised memory, which has
    different values in each run.

    Raises:
        ModelError: A tensor is missing, unknown or not finite, or was not loaded.
    """
    from peft import get_peft_model_state_dict  # here, because peft is an optional dependency

    kind = type(denoiser).__name__
    if name not in getattr(denoiser, "peft_config", {}):
        raise ModelError(f"no tensor of the file is for a {kind}", OTHER_MODEL_HINT)
    held = get_peft_model_state_dict(denoiser, adapter_name=name)
    others = given.keys() - held.keys()
    strange = sorted(key for key in others if not given[key].sources <= ignored)
    if strange:
        _refuse(f"{short_repr(strange[0])} is not in a {kind}", strange)
    if missing := sorted(held.keys() - given.keys()):
        _refuse(f"the file has no {short_repr(missing[0])}", missing)
    for key, tensor in held.items():
        expected = given[key].as_subclass(torch.Tensor).to(tensor.device, tensor.dtype)
        if not expected.float().isfinite().all():
            raise ModelError(
                f"{short_repr(key)} has numbers that are not finite",
                "the file is damaged: download or save it again",
                details={"tensor": key},
            )
        if not torch.equal(tensor, expected):
            _refuse(f"{short_repr(key)} was not loaded", [key])


def _names(sources: Iterable[str]) -> str:
    return " and ".join(map(short_repr, sorted(sources)))


def _refuse(reason: str, tensors: list[str]) -> None:
    raise ModelError(
        f"{reason} ({len(tensors)} such tensors)" if len(tensors) > 1 else reason,
        OTHER_MODEL_HINT,
        details={"tensors": tensors[:_MAX_NAMED], "count": len(tensors)},
    )


#: Maximum number of tensors that an error's `details` name.
_MAX_NAMED = 20
