"""Guiders of modular checkpoints: the classes that svdpp runs, and configs that it refuses."""

from __future__ import annotations

from collections.abc import Mapping

from svdpp.config.families.spec import CheckpointConfigs, ConfigFile

#: Regular expression for the guider classes that svdpp supports. Clips of modular pipelines with
#: these guiders have been compared with diffusers' own clips, and were bitwise equal. This includes
#: guiders that keep state between steps, such as the momentum of `AdaptiveProjectedGuidance`,
#: because the ranks of a modular pipeline pass this state on with each clip.
GUIDER_CLASSES = (
    "ClassifierFreeGuidance|ClassifierFreeZeroStarGuidance|AdaptiveProjected(Mix)?Guidance"
)
#: `GUIDER_CLASSES` and `SkipLayerGuidance`, which skips some of the denoiser's layers. Only some
#: families support it, because diffusers can skip the layers of only some denoisers, such as Wan's.
GUIDER_CLASSES_WITH_SKIPS = f"{GUIDER_CLASSES}|SkipLayerGuidance"

#: Supported values of each key of `skip_layer_config`, except `indices`. The first value is the
#: default of diffusers.
_SKIPPED_LAYERS: Mapping[str, tuple[object, ...]] = {
    "fqn": ("auto", "blocks"),
    "skip_attention": (True,),
    "skip_ff": (True,),
    "skip_attention_scores": (False,),
    "dropout": (1.0,),
}


def check_guiders(configs: CheckpointConfigs, *names: str) -> None:
    """Raise a `ModelError` if svdpp does not support the config of one of a checkpoint's guiders.

    Args:
        configs: Configs of the checkpoint.
        names: Names of the pipeline's guiders. A guider that the checkpoint's index does not name
            is not checked, because diffusers creates a default guider for it.

    Raises:
        ModelError: A guider has no class or is disabled, or svdpp does not support its config.
    """
    for name in names:
        if name in configs.classes:
            _check_guider(configs, name)
        elif configs.index.values.get(name) is not None:
            raise configs.index.error(
                f"the entry of {name} names no class",
                f"remove the entry {name} from the file: diffusers then creates a default {name}",
                details={"component": name},
            )


def _check_guider(configs: CheckpointConfigs, name: str) -> None:
    guider = configs.of(name, enabled=True)
    guider.require("enabled", True, "because the guidance scale would otherwise have no effect")
    # If this key is true, a guidance scale of 0 turns guidance off in diffusers. svdpp supports
    # only the usual meaning of the scale, by which 1 turns guidance off.
    guider.refuse("use_original_formulation", "gives the guidance scale another meaning")
    if configs.classes[name] != "SkipLayerGuidance":
        return
    if guider.values.get("skip_layer_guidance_layers") is not None:
        raise guider.error(
            "the key skip_layer_guidance_layers is not supported: diffusers fails in the first "
            "step that skips layers",
            'name the layers by skip_layer_config instead, such as {"indices": [7, 8, 9]}',
            details={"key": "skip_layer_guidance_layers"},
        )
    skipped = guider.values.get("skip_layer_config")
    layers = configs.of("transformer").positive_int("num_layers", 1024)
    for entry in skipped if isinstance(skipped, list) else [skipped]:
        _check_skipped_layers(guider, entry, layers)


def _check_skipped_layers(guider: ConfigFile, entry: object, layers: int) -> None:
    """Raise a `ModelError` unless svdpp supports an entry of a guider's `skip_layer_config`.

    The entry must name layers by index, and its other keys must have a value in `_SKIPPED_LAYERS`.
    `layers` is the denoiser's number of layers.
    """
    values = entry if isinstance(entry, Mapping) else {}
    indices = values.get("indices")
    if not (
        isinstance(indices, list)
        and indices
        and all(type(index) is int and 0 <= index < layers for index in indices)
    ):
        raise guider.error(
            f"skip_layer_config must name layers of the denoiser by indices from 0 to "
            f'{layers - 1}, such as {{"indices": [{layers // 2}]}}',
            details={"key": "skip_layer_config.indices", "lowest": 0, "highest": layers - 1},
        )
    for key, supported in _SKIPPED_LAYERS.items():
        if values.get(key, supported[0]) not in supported:
            allowed = " or ".join(map(str, supported))
            raise guider.error(
                f"{key} in skip_layer_config must be {allowed}: svdpp supports only guiders "
                "that skip whole layers of the denoiser",
                "remove the key from skip_layer_config",
                details={"key": f"skip_layer_config.{key}", "supported": list(supported)},
            )
