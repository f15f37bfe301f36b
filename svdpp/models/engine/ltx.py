"""What is special about LTX-Video and LTX-2: guidance, noise of the decode."""

from __future__ import annotations

from typing import Any

from svdpp.config import LtxSampling
from svdpp.config.limits import require
from svdpp.models.engine.configs import Configs, Facts


def facts(configs: Configs) -> Facts:
    """Whether the VAE takes a timestep; refuses one whose decoder draws noise by itself."""
    vae = configs.of("vae", timestep_conditioning=False, decoder_inject_noise=[])
    layers = vae.values["decoder_inject_noise"]
    if isinstance(layers, list) and any(layers):
        raise vae.error(
            "decoder_inject_noise is not supported: the decoder would draw noise from torch's "
            "global generator, so that no two runs are equal"
        )
    has_timestep = bool(vae.values["timestep_conditioning"])
    return {
        "decode_draws": has_timestep,
        "unused_parameters": () if has_timestep else ("decode_timestep", "decode_noise_scale"),
    }


def check(checkpoint: Any, sampling: LtxSampling) -> None:
    """Refuses a single step where it gives values that are not finite."""
    require(
        sampling.num_inference_steps > 1 or not checkpoint.scheduler.values.get("shift_terminal"),
        "--steps must be 2 or more: the model's scheduler divides by zero for 1",
    )


def generator_device(checkpoint: Any, sampling: LtxSampling, device: str) -> str:
    """The device of a clip's generator: the CPU wherever diffusers accepts one.

    `LTXImageToVideoPipeline` draws the decoder's noise by `torch.randn` on the pipeline's device,
    which takes no generator of the CPU.
    """
    return device if sampling.from_image and checkpoint.decode_draws else "cpu"


def facts_2(configs: Configs) -> Facts:
    """Refuses an LTX-2 checkpoint whose decode draws noise."""
    if facts(configs)["decode_draws"]:
        raise configs.of("vae").error("a decode that draws noise is not supported")
    return {}


def arguments_2(sampling: Any) -> dict[str, Any]:
    """The block of LTX-2's spatio-temporal guidance in a list; the image as it is.

    By default diffusers compresses the image by H.264 first, for which it needs PyAV.
    """
    has_stg = sampling.stg_scale > 0 or sampling.audio_stg_scale > 0
    blocks = [sampling.stg_block] if has_stg else None
    image = {"image_crf": 0} if sampling.from_image else {}
    return {"spatio_temporal_guidance_blocks": blocks, **image}
