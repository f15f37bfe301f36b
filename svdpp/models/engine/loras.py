"""LoRAs of a loaded pipeline: loaded by diffusers, and checked tensor by tensor.

diffusers renames a file's tensors, scales some, drops others, and only warns of what has no place.
So the renaming is done once more with tensors that remember from which ones of the file they come,
and the loaded model must hold exactly these.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from svdpp.errors import ModelError
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.records import patch_methods
from svdpp.models.files import display_name, library_errors, short_repr
from svdpp.models.lora_files import LoraFile, ignored_tensors


def load_loras(pipe: Any, checkpoint: Checkpoint) -> None:
    """Load LoRAs as diffusers does; of a rank's pipeline, into the components that it holds.

    Args:
        pipe: pipeline of diffusers, whose denoisers may be skeletons.
        checkpoint: checked checkpoint with the LoRAs.

    Raises:
        ModelError: a tensor of a file is not in the model, or one of the model not in the file.
    """
    if not checkpoint.loras:
        return
    loadable = [getattr(pipe, part, None) for part in pipe._lora_loadable_modules]
    with ExitStack() as patches:
        patches.enter_context(warnings.catch_warnings(action="ignore"))
        for module in loadable:
            if getattr(module, "is_skeleton", False):
                patches.enter_context(
                    patch_methods(module, load_lora_adapter=lambda *_, **__: None)
                )
        for place, file in enumerate(checkpoint.loras):
            label = f"the LoRA {display_name(file.lora.name)}"
            with library_errors(label, checkpoint):
                try:
                    _load(pipe, checkpoint, file, f"lora{place}")
                except ModelError as error:
                    message = f"{label}: {error.message}"
                    raise ModelError(message, error.hint, details=error.details) from error
    names = {name for names in pipe.get_list_adapters().values() for name in names}
    weights = {f"lora{place}": file.lora.weight for place, file in enumerate(checkpoint.loras)}
    if held := [name for name in weights if name in names]:
        pipe.set_adapters(held, [weights[name] for name in held])


def _load(pipe: Any, checkpoint: Checkpoint, file: LoraFile, name: str) -> None:
    denoiser = getattr(pipe, file.part)
    is_held = not getattr(denoiser, "is_skeleton", False)
    given: dict[str, _Traced] = {}
    ignored: frozenset[str] = frozenset()
    if is_held:
        ignored = frozenset(ignored_tensors(file.path, checkpoint))
        given = _converted(pipe, file, ignored)
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
    if is_held:
        _check_loaded(denoiser, given, ignored, name)


class _Traced(torch.Tensor):
    """A tensor that knows from which tensors of a file it was computed."""

    sources: frozenset[str] = frozenset()
    """Names in the file."""
    read: set[str]
    """Names of all tensors of the file whose numbers were read, such as those of `alpha`."""

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


def _converted(pipe: Any, file: LoraFile, ignored: frozenset[str]) -> dict[str, _Traced]:
    """Return the tensors for the denoiser by diffusers' names, after its own conversion.

    Raises:
        ModelError: the conversion drops a tensor of the file, or renames it to another part.
    """
    read: set[str] = set()
    traced: dict[str, _Traced] = {}
    for name, tensor in load_file(file.path).items():
        each = traced[name] = tensor.as_subclass(_Traced)
        each.sources, each.read = frozenset([name]), read
    converted: dict[str, Any] = pipe.lora_state_dict(dict(traced))
    if expand := getattr(pipe, "_maybe_expand_t2v_lora_for_i2v", None):  # zeros for what it lacks
        converted = expand(transformer=pipe.transformer, state_dict=converted)
    prefix = "transformer."
    given = {
        key.removeprefix(prefix): each for key, each in converted.items() if key.startswith(prefix)
    }
    if given and "lora_A" not in next(iter(given)):  # as `load_lora_adapter`
        given = convert_unet_state_dict_to_peft(given)
    used = read.union(*(each.sources for each in given.values()))
    if dropped := sorted(traced.keys() - used - ignored):
        _refuse(f"diffusers has no use for {short_repr(dropped[0])}", dropped)
    return given


def _check_shapes(denoiser: Any, given: Mapping[str, _Traced], file: LoraFile) -> None:
    """Raise ModelError if a factor does not fit the weight that it changes."""
    for key, factor in given.items():
        path, _, factor_name = key.partition(".lora_")
        is_first = factor_name.startswith("A")
        try:
            module = denoiser.get_submodule(path)
        except AttributeError:
            continue  # refused or ignored after the load
        weight = getattr(getattr(module, "base_layer", module), "weight", None)
        if weight is None or factor.dim() < 2 or not key.endswith(".weight"):
            continue
        expected = weight.shape[1] if is_first else weight.shape[0]
        if factor.shape[1 if is_first else 0] != expected:
            shapes = [list(factor.shape), list(weight.shape)]
            raise ModelError(
                f"the tensor {_names(factor.sources)} of shape {shapes[0]} does not fit the weight "
                f"{path} of shape {shapes[1]}",
                f"use a LoRA for this model; {display_name(file.path.name)} is for another one",
                details={
                    "tensor": sorted(factor.sources),
                    "shape": shapes[0],
                    "weight": path,
                    "weight_shape": shapes[1],
                },
            )


def _check_loaded(
    denoiser: Any, given: Mapping[str, _Traced], ignored: frozenset[str], name: str
) -> None:
    """Raise ModelError unless the adapter `name` of a denoiser is what the file gives it.

    A weight of the adapter that is not in the file would be uninitialised memory: other bits in
    each run.
    """
    from peft import get_peft_model_state_dict  # an extra

    kind = type(denoiser).__name__
    if name not in getattr(denoiser, "peft_config", {}):
        raise ModelError(f"none of its tensors is for a {kind}")
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
        "use a LoRA that was trained for this model",
        details={"tensors": tensors[:_MAX_NAMED], "count": len(tensors)},
    )


#: Tensors that the details of an error name.
_MAX_NAMED = 20
