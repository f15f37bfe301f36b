"""What is special about each family beyond the fields of its row; knows no torch."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

from svdpp.config import LtxSampling, WanSampling
from svdpp.config.limits import MAX_STEPS, require
from svdpp.models.engine.configs import Configs, Facts, short_repr


def svd(configs: Configs) -> Facts:
    """What the configs of a checkpoint say of its frames; refuses other sizes of its inputs."""
    reason = "the size of diffusers' CLIP input"
    configs.of("image_encoder").require("image_size", 224, reason)
    return {"model_frames": configs.of("unet").count("num_frames", 1024)}


def wan(configs: Configs) -> Facts:
    """What the configs of a checkpoint say of its inputs, sizes and experts."""
    configs.of("transformer").refuse("pos_embed_seq_len", "is for a first and a last image")
    unit = 2 * configs.of("vae", scale_factor_spatial=8).count("scale_factor_spatial", 64)
    index, has_second = configs.index, "transformer_2" in configs.classes
    ratio = index.values.get("boundary_ratio")
    is_ratio = isinstance(ratio, float) and 0 < ratio < 1
    if not (is_ratio if has_second else ratio is None):
        state = "there" if has_second else "missing"
        message = f"boundary_ratio is {short_repr(ratio)}, and the expert transformer_2 is {state}"
        raise index.error(message)
    return {
        "boundary_ratio": ratio,
        "size_multiple": (unit, unit),
        "unused_parameters": () if has_second else ("guidance_scale_2",),
        **({"image_use": "optional"} if index.values.get("expand_timesteps") else {}),
    }


def wan_from_video(configs: Configs) -> Facts:
    """As `wan`, of a model that the pipeline for videos can run."""
    found = wan(configs)
    if "image_use" in found or found["boundary_ratio"] is not None:
        raise configs.index.error("only Wan 2.1 for text makes clips from a video")
    return found


def check_wan_video(checkpoint: Any, sampling: Any) -> None:
    """As `check_wan`, of the steps that run."""
    check_strength(checkpoint, sampling)
    check_wan(checkpoint, sampling)


def check_wan(checkpoint: Any, sampling: WanSampling) -> None:
    """Refuses a scale without effect, and timesteps that diffusers cannot run."""
    require(
        sampling.guidance_scale_2 is None or sampling.guided,
        "--param guidance_scale_2 has no effect: --guidance-scale of 1 or less turns it off",
    )
    if not sampling.from_image:
        return
    # Some are whole numbers: of two equal ones, the pipeline takes the second for the first.
    timesteps = checkpoint.timesteps(sampling).tolist()
    require(
        len(timesteps) == 1 or timesteps[0] != timesteps[1],
        f"the first two of {len(timesteps)} steps have the same timestep, {timesteps[0]}: "
        "diffusers cannot run that",
        "use fewer --steps or a lower --param flow_shift",
    )


def ltx(configs: Configs) -> Facts:
    """Whether the VAE takes a timestep; refuses one whose decoder draws noise by itself."""
    vae = configs.of("vae", timestep_conditioning=False, decoder_inject_noise=[])
    vae.refuse("decoder_inject_noise", "draws noise from torch's global generator")
    has_timestep = bool(vae.values["timestep_conditioning"])
    return {
        "decode_draws": has_timestep,
        "unused_parameters": () if has_timestep else ("decode_timestep", "decode_noise_scale"),
    }


def check_ltx(checkpoint: Any, sampling: LtxSampling) -> None:
    """Refuses a rescaling without effect, and one step where the scheduler divides by zero."""
    require(
        sampling.num_inference_steps > 1 or not checkpoint.scheduler.values.get("shift_terminal"),
        "--steps must be 2 or more: the model's scheduler divides by zero for 1",
    )
    require(
        sampling.guidance_rescale == 0.0 or sampling.guided,
        "--param guidance_rescale has no effect: --guidance-scale of 1 or less turns it off",
    )


def ltx_generator_device(checkpoint: Any, sampling: LtxSampling, device: str) -> str:
    """The device of a clip's generator: the CPU wherever diffusers accepts one.

    `LTXImageToVideoPipeline` draws the decoder's noise by `torch.randn` on the pipeline's device,
    which takes no generator of the CPU.
    """
    return device if sampling.from_image and checkpoint.decode_draws else "cpu"


def ltx2(configs: Configs) -> Facts:
    """Refuses an LTX-2 checkpoint whose decode draws noise."""
    if ltx(configs)["decode_draws"]:
        raise configs.of("vae").error("a decode that draws noise is not supported")
    return {}


def ltx2_arguments(sampling: Any) -> dict[str, Any]:
    """The block of LTX-2's spatio-temporal guidance in a list; the image as it is.

    By default diffusers compresses the image by H.264 first, for which it needs PyAV.
    """
    has_stg = sampling.stg_scale > 0 or sampling.audio_stg_scale > 0
    blocks = [sampling.stg_block] if has_stg else None
    image = {"image_crf": 0} if sampling.from_image else {}
    return {"spatio_temporal_guidance_blocks": blocks, **image}


#: Frames that each chunk of a FramePack clip adds, and that the pipeline counts for it.
FRAMEPACK_CHUNK, _FRAMEPACK_WINDOW = 36, 33


def hunyuan_video(configs: Configs) -> Facts:
    """Refuses an image to video checkpoint that removes frames of the clip."""
    if "image_processor" in configs.classes:
        transformer = configs.of("transformer", image_condition_type=None)
        reason = "as for others the clip lacks its first four frames"
        transformer.require("image_condition_type", "token_replace", reason)
    return {}


def hunyuan_video_15(configs: Configs) -> Facts:
    """The pipeline has a fixed length of prompts, and sizes of its own for an image."""
    unit = configs.of("vae", spatial_compression_ratio=16).count("spatial_compression_ratio", 64)
    target = configs.of("transformer", target_size=640).count("target_size", 8192)
    return {"unused_parameters": ("max_sequence_length",), "image_sizes": (target, unit)}


def check_hunyuan_video_15(checkpoint: Any, sampling: Any) -> None:
    """Refuses the size of a clip from an image that the pipeline would change."""
    if not sampling.from_image:
        return
    from diffusers.pipelines.hunyuan_video1_5 import image_processor  # seconds

    (target, unit), height, width = checkpoint.image_sizes, sampling.height, sampling.width
    processor = image_processor.HunyuanVideo15ImageProcessor(vae_scale_factor=unit)

    def is_kept(size: tuple[int, int]) -> bool:
        with suppress(ValueError):  # diffusers' own for a ratio beyond its list
            return bool(processor.calculate_default_height_width(*size, target) == size)
        return False

    sizes = filter(is_kept, image_processor.generate_crop_size_list(target, unit))
    nearest = min(sizes, key=lambda size: abs(size[0] / size[1] - height / width))
    require(
        nearest == (height, width),
        f"from an image the model makes no clips of --height {height} --width {width}",
        f"nearest: --height {nearest[0]} --width {nearest[1]}",
    )


def check_framepack(_: Any, sampling: Any) -> None:
    """Refuses a number of frames or steps that does not divide into chunks."""
    frames, steps = sampling.num_frames, sampling.num_inference_steps
    chunks = (frames - 1) // FRAMEPACK_CHUNK
    require(frames > 1, "--frames must be 37 or more")
    require(
        steps % chunks == 0,
        f"--steps counts those of all chunks: for {frames} frames it must be a multiple of "
        f"{chunks}, got {steps}",
    )


def framepack_arguments(sampling: Any) -> dict[str, Any]:
    """Steps of each chunk; the frames by which the pipeline finds the number of chunks."""
    chunks = (sampling.num_frames - 1) // FRAMEPACK_CHUNK
    return {
        "num_frames": chunks * _FRAMEPACK_WINDOW,
        "num_inference_steps": sampling.num_inference_steps // chunks,
    }


def latte(configs: Configs) -> Facts:
    """The pipeline makes as many frames as its transformer says, of prompts of a fixed length."""
    frames = configs.of("transformer", video_length=16).count("video_length", 1024)
    return {"unused_parameters": ("max_sequence_length",), "fixed_frames": frames}


def kandinsky5(configs: Configs) -> Facts:
    """Refuses the sparse attention, whose kernels only CUDA has."""
    reason = "as sparse attention needs kernels of CUDA, and was never compared"
    transformer = configs.of("transformer", attention_type="regular")
    transformer.require("attention_type", "regular", reason)
    return {}


def kandinsky5_frames(_: Any, sampling: Any) -> None:
    """Refuses few frames: the pipeline adapts the first four latent frames to those that follow."""
    enough = not sampling.from_image or sampling.num_frames >= 17
    require(enough, f"--frames must be at least 17 from an image, got {sampling.num_frames}")


def all_steps(sampling: Any) -> dict[str, int]:
    """Steps of which the pipeline leaves out the first, as many as `strength` says.

    The steps of a clip are those that run.
    """
    steps, strength = sampling.num_inference_steps, sampling.strength
    fewest = max(steps, int(steps / strength) - 1)
    found = (total for total in itertools.count(fewest) if int(total * strength) >= steps)
    return {"num_inference_steps": next(found)}


def check_strength(_: Any, sampling: Any) -> None:
    """Refuses what makes too many steps of all."""
    (total,) = all_steps(sampling).values()
    require(
        total <= MAX_STEPS,
        f"--steps {sampling.num_inference_steps} are the last of {total} for --param strength="
        f"{sampling.strength:g}, and the limit is {MAX_STEPS}",
        "use fewer --steps or more strength",
    )
