"""What is special about LTX-Video and LTX-2: sizes, guidance, noise of the decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from svdpp.config import LtxSampling
from svdpp.config.limits import require
from svdpp.models.engine.configs import Configs, Facts, JsonFile, short_repr


def facts(configs: Configs) -> Facts:
    """What the configs of a checkpoint say of its sizes and its VAE."""
    vae, transformer = configs.of("vae", **_VAE), configs.of("transformer", **_TRANSFORMER)
    for key in _TRANSFORMER:
        transformer.require(key, 1, "as in the published LTX-Video")
    if any(_list(vae, "decoder_inject_noise")):
        raise vae.error(
            "decoder_inject_noise is not supported: the decoder would draw noise from torch's "
            "global generator, so that no two runs are equal"
        )
    spatial, temporal = _compression(vae)
    has_timestep = bool(vae.values["timestep_conditioning"])
    return {
        "size_multiple": (spatial, spatial),
        "frames_multiple": temporal,
        "decode_draws": has_timestep,
        "unused_parameters": () if has_timestep else ("decode_timestep", "decode_noise_scale"),
    }


def check(checkpoint: Any, sampling: LtxSampling) -> None:
    """Refuses parameters that have no effect, or that diffusers cannot run."""
    require(
        sampling.num_inference_steps > 1 or not checkpoint.scheduler.values.get("shift_terminal"),
        "--steps must be 2 or more: the model's scheduler divides by zero for 1",
    )
    if not checkpoint.decode_draws:
        for name, given in (
            ("--param decode_timestep", sampling.decode_timestep != 0.0),
            ("--param decode_noise_scale", sampling.decode_noise_scale is not None),
        ):
            require(not given, f"{name} has no effect: the model's VAE takes no timestep")
    require(
        sampling.guidance_rescale == 0.0 or sampling.guided,
        "--param guidance_rescale has no effect: --guidance-scale of 1 or less turns it off",
    )


def generator_device(checkpoint: Any, sampling: LtxSampling, device: str) -> str:
    """The device of a clip's generator: the CPU wherever diffusers accepts one.

    `LTXImageToVideoPipeline` draws the decoder's noise by `torch.randn` on the pipeline's device,
    which takes no generator of the CPU.
    """
    return device if sampling.from_image and checkpoint.decode_draws else "cpu"


def facts_2(configs: Configs) -> Facts:
    """What the configs of an LTX-2 checkpoint say; refuses one whose decode draws noise."""
    vae = configs.of("vae", decoder_inject_noise=[], timestep_conditioning=False)
    if any(vae.values["decoder_inject_noise"]) or vae.values["timestep_conditioning"]:
        raise vae.error("a decode that draws noise is not supported")
    return {}


def arguments_2(sampling: Any) -> dict[str, Any]:
    """The block of LTX-2's spatio-temporal guidance in a list; the image as it is.

    By default diffusers compresses the image by H.264 first, for which it needs PyAV.
    """
    has_stg = sampling.stg_scale > 0 or sampling.audio_stg_scale > 0
    blocks = [sampling.stg_block] if has_stg else None
    image = {"image_crf": 0} if sampling.from_image else {}
    return {"spatio_temporal_guidance_blocks": blocks, **image}


def _compression(vae: JsonFile) -> tuple[int, int]:
    """Pixels and frames per latent cell, as `AutoencoderKLLTXVideo.__init__` computes them."""
    halvings = 2 ** sum(map(bool, _list(vae, "spatio_temporal_scaling")))
    sizes = []
    for ratio, patch in (("spatial", "patch_size"), ("temporal", "patch_size_t")):
        key = f"{ratio}_compression_ratio"
        is_given = vae.values[key] is not None
        sizes.append(vae.count(key, 1024) if is_given else vae.count(patch, 64) * halvings)
    return sizes[0], sizes[1]


def _list(config: JsonFile, key: str) -> list[Any]:
    value = config.values[key]
    if not (isinstance(value, list) and len(value) <= _MAX_BLOCKS):
        raise config.error(f"{key} is {short_repr(value)}, not a list of booleans")
    return value


_MAX_BLOCKS = 16
# Defaults of diffusers' classes, for keys that older files lack.
_VAE: Mapping[str, Any] = {
    "spatio_temporal_scaling": [True, True, True, False],
    "patch_size": 4,
    "patch_size_t": 1,
    "spatial_compression_ratio": None,
    "temporal_compression_ratio": None,
    "timestep_conditioning": False,
    "decoder_inject_noise": [],
}
_TRANSFORMER: Mapping[str, Any] = {"patch_size": 1, "patch_size_t": 1}
