"""Registry of families: what is special about each one's pipelines of diffusers; knows no torch.

`docs/new-model.md` says how to add one. All else is the same for all families.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from svdpp.config import LtxSampling, WanSampling
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS, require
from svdpp.models.files import short_repr

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Configs

#: Facts that a family's configs tell of a checkpoint: fields of `Checkpoint`.
CheckpointFacts = dict[str, Any]

#: Components that an encode of an image uses, as far as a checkpoint has it.
IMAGE_ENCODERS = ("vae", "image_encoder", "image_processor", "feature_extractor")
_TWO_ENCODERS = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
_FLOW = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")


@dataclass(frozen=True)
class FamilySpec:
    """One family of models, and what the engine does otherwise for it."""

    title: str
    denoiser: str
    """Class of the denoisers: others may keep state that no packet carries."""
    text_pipeline: str | None = None
    """Pipeline's class for clips from text alone."""
    image_pipeline: str | None = None
    """Pipeline's class for clips from an image."""
    _: KW_ONLY
    image_argument: str = "image"
    """Argument of `__call__` for that image, or for the frames of a video."""
    aliases: tuple[str, ...] = ()
    """Other pipelines whose checkpoints the family runs if it is asked for by name."""
    size_from_image: bool = False
    """Whether the image's shape sets the clip's size; the image is then resized to it first."""
    text_and_image: bool = False
    """Whether a checkpoint of either class has all components of the other one."""
    takes_prompt: bool = True
    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    denoisers: tuple[str, ...] = ("transformer",)
    encode_components: tuple[str, ...] = ("tokenizer", "text_encoder")
    """Components that an encode uses."""
    decode_components: tuple[str, ...] = ("vae",)
    shared_components: tuple[str, ...] = ()
    """Components without weights that every rank uses."""
    fp32_components: frozenset[str] = frozenset()
    """Components in float32, whatever the model's dtype is."""
    loras: bool = True
    """Whether diffusers' pipeline loads LoRAs."""
    record_uses: Mapping[str, Literal["unused", "first step"] | int] = field(default_factory=dict)
    """Users of a record that are not all steps and the decode: none, as of images before they are
    encoded, or the first step alone; of several with one name, the number of the one in use."""
    initial_latent_source: str | None = None
    """Tensor of later packets that gives their steps the first latent. `latents`: they use parts
    which no step changes; None: only the first step uses it."""
    num_results_equal_latents: int = 0
    """Number of schedulers, by their first steps, whose results are part of the latent; these do
    not travel."""
    branches: Literal["calls", "batch"] | None = None
    """A guided step evaluates its two branches by two calls whose results are used after both, or
    by one call with a batch of two, which two ranks may round differently; None: otherwise."""
    latent_channels: Callable[[Any], int] = lambda pipe: int(pipe.transformer.config.in_channels)
    """Channels of the latent, from a loaded pipeline, as its `prepare_latents` counts them."""
    latent_frames: Callable[[Any, Any, int], int] = lambda _, __, frames: frames
    """Frames of the latent, from the pipeline, the sampling parameters, and the frames that the VAE
    makes of a clip's."""
    latent_dtype: Literal["fp32", "model", "stepped", "stepped from text"] = "fp32"
    """dtype of the latent: `fp32`; that of the denoiser (`model`); or float32 until the first step,
    from which on `FlowMatchEulerDiscreteScheduler` returns that of the denoiser (`stepped`), except
    for clips from an image (`stepped from text`)."""
    decodes_in_chunks: bool = False
    """Whether `decode_latents` decodes `decode_chunk_size` frames at a time, each on their own."""
    memory_options: bool = False
    """Whether the denoiser and the VAE take `memory_opt` and `channels_last`."""
    frame_limits: tuple[int, int, str] = (1, MAX_FRAMES, "all that svdpp makes")
    """Fewest and most frames of a clip, and the reason."""
    checkpoint_facts: Callable[[Configs], CheckpointFacts] = lambda _: {}
    """Returns what the configs of a checkpoint say; refuses what the spec does not cover."""
    check_sampling: Callable[[Any, Any], None] = lambda *_: None
    """Refuses sampling parameters (second) that diffusers cannot run with a checkpoint (first)."""
    call_arguments: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    """Arguments of `__call__` that are not sampling parameters, from those that are."""
    generator_device: Callable[[Any, Any, str], str] = lambda *_: "cpu"
    """Where noise is drawn: the CPU if diffusers accepts that: all devices give the same clip."""
    resizes_early: bool = False
    """Whether an image is resized before the encode: see `model`."""

    @property
    def components(self) -> frozenset[str]:
        """Names of the components that a rank may need."""
        return self.required_components.union(IMAGE_ENCODERS, self.denoisers)

    @property
    def required_components(self) -> frozenset[str]:
        """Names of those of `components` that every checkpoint has."""
        encode_and_decode = (*self.encode_components, *self.decode_components)
        return frozenset((*encode_and_decode, self.denoisers[0], *self.shared_components))

    def pipeline(self, from_image: bool) -> str:
        """Return the name of the pipeline's class for a clip from an image or from text."""
        name = self.image_pipeline if from_image else self.text_pipeline
        assert name is not None
        return name


# What fields cannot say.


def _svd_facts(configs: Configs) -> CheckpointFacts:
    reason = "the size of diffusers' CLIP input"
    configs.of("image_encoder").require("image_size", 224, reason)
    return {"model_frames": configs.of("unet").positive_int("num_frames", 1024)}


def _wan_facts(configs: Configs) -> CheckpointFacts:
    configs.of("transformer").refuse("pos_embed_seq_len", "is for a first and a last image")
    unit = 2 * configs.of("vae", scale_factor_spatial=8).positive_int("scale_factor_spatial", 64)
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
        **_image_projection(configs),
        **({"image_use": "optional"} if index.values.get("expand_timesteps") else {}),
    }


def _image_projection(configs: Configs) -> CheckpointFacts:
    """Whether the denoiser takes the embedding of an image, and LoRAs may change that."""
    transformer = configs.of("transformer", image_dim=None)
    return {"has_image_projection": transformer.values["image_dim"] is not None}


def _wan_from_video_facts(configs: Configs) -> CheckpointFacts:
    found = _wan_facts(configs)
    if "image_use" in found or found["boundary_ratio"] is not None:
        raise configs.index.error("only Wan 2.1 for text makes clips from a video")
    return found


def _check_wan_video(checkpoint: Any, sampling: Any) -> None:
    _check_strength(checkpoint, sampling)
    _check_wan(checkpoint, sampling)


def _check_wan(checkpoint: Any, sampling: WanSampling) -> None:
    if not sampling.from_image:
        return
    # Some are whole numbers: of two equal ones, the pipeline takes the second for the first.
    timesteps = checkpoint.timesteps(sampling).tolist()
    require(
        len(timesteps) == 1 or timesteps[0] != timesteps[1],
        f"the first two of {len(timesteps)} steps have the same timestep, {timesteps[0]}: "
        "diffusers cannot run that",
        "use fewer --steps or a lower --param flow_shift",
        steps=len(timesteps),
        timestep=timesteps[0],
    )


def _ltx_facts(configs: Configs) -> CheckpointFacts:
    """Whether the VAE takes a timestep; refuses one whose decoder draws noise by itself."""
    vae = configs.of("vae", timestep_conditioning=False, decoder_inject_noise=[])
    vae.refuse("decoder_inject_noise", "draws noise from torch's global generator")
    has_timestep = bool(vae.values["timestep_conditioning"])
    return {
        "decode_draws_noise": has_timestep,
        "unused_parameters": () if has_timestep else ("decode_timestep", "decode_noise_scale"),
    }


def _check_ltx(checkpoint: Any, sampling: LtxSampling) -> None:
    require(
        sampling.num_inference_steps > 1 or not checkpoint.scheduler_config.get("shift_terminal"),
        "--steps must be 2 or more: the model's scheduler divides by zero for 1",
        steps=sampling.num_inference_steps,
        lowest=2,
    )


def ltx_generator_device(checkpoint: Any, sampling: LtxSampling, device: str) -> str:
    """Return where noise is drawn: on the CPU, except where diffusers draws it by `torch.randn`.

    `LTXImageToVideoPipeline` does so on its own device if the VAE takes a timestep.

    Args:
        checkpoint: checked checkpoint.
        sampling: sampling parameters.
        device: device of the pipeline.
    """
    return device if sampling.from_image and checkpoint.decode_draws_noise else "cpu"


def _ltx2_facts(configs: Configs) -> CheckpointFacts:
    if _ltx_facts(configs)["decode_draws_noise"]:
        raise configs.of("vae").error("a decode that draws noise is not supported")
    return {}


def _ltx2_arguments(sampling: Any) -> dict[str, Any]:
    # By default diffusers compresses the image by H.264 first, for which it needs PyAV.
    has_stg = sampling.stg_scale > 0 or sampling.audio_stg_scale > 0
    blocks = [sampling.stg_block] if has_stg else None
    image = {"image_crf": 0} if sampling.from_image else {}
    return {"spatio_temporal_guidance_blocks": blocks, **image}


# Frames that each chunk of a FramePack clip adds, and that the pipeline counts for it.
_FRAMEPACK_CHUNK, _FRAMEPACK_WINDOW = 36, 33
# `latent_window_size` of the pipeline: latent frames of each chunk.
_FRAMEPACK_LATENT = 9


def _hunyuan_video_facts(configs: Configs) -> CheckpointFacts:
    if "image_processor" in configs.classes:
        transformer = configs.of("transformer", image_condition_type=None)
        reason = "as for others the clip lacks its first four frames"
        transformer.require("image_condition_type", "token_replace", reason)
    return {}


def _hunyuan_video_15_facts(configs: Configs) -> CheckpointFacts:
    """Return the sizes for clips from an image, and that the length of prompts is fixed."""
    unit = configs.of("vae", spatial_compression_ratio=16).positive_int(
        "spatial_compression_ratio", 64
    )
    target = configs.of("transformer", target_size=640).positive_int("target_size", 8192)
    return {"unused_parameters": ("max_sequence_length",), "image_sizes": (target, unit)}


def _check_hunyuan_video_15(checkpoint: Any, sampling: Any) -> None:
    if not sampling.from_image:
        return
    from diffusers.pipelines.hunyuan_video1_5 import image_processor  # seconds

    (target, unit), height, width = checkpoint.image_sizes, sampling.height, sampling.width
    processor = image_processor.HunyuanVideo15ImageProcessor(vae_scale_factor=unit)
    kept = (  # the pipeline rounds some of its own to others
        size
        for size in image_processor.generate_crop_size_list(target, unit)
        if processor.calculate_default_height_width(*size, target) == size
    )
    nearest = min(kept, key=lambda size: abs(size[0] / size[1] - height / width))
    require(
        nearest == (height, width),
        f"from an image the model makes no clips of --height {height} --width {width}",
        f"nearest: --height {nearest[0]} --width {nearest[1]}",
        height=height,
        width=width,
        nearest_height=nearest[0],
        nearest_width=nearest[1],
    )


def _check_framepack(_: Any, sampling: Any) -> None:
    frames, steps = sampling.num_frames, sampling.num_inference_steps
    chunks = (frames - 1) // _FRAMEPACK_CHUNK
    require(
        steps % chunks == 0,
        f"--steps counts those of all chunks: for {frames} frames it must be a multiple of "
        f"{chunks}, got {steps}",
        frames=frames,
        chunks=chunks,
        steps=steps,
    )


def _framepack_arguments(sampling: Any) -> dict[str, Any]:
    """Steps of each chunk; the frames by which the pipeline finds the number of chunks."""
    chunks = (sampling.num_frames - 1) // _FRAMEPACK_CHUNK
    return {
        "num_frames": chunks * _FRAMEPACK_WINDOW,
        "num_inference_steps": sampling.num_inference_steps // chunks,
    }


def _latte_facts(configs: Configs) -> CheckpointFacts:
    """Return the only number of frames, and that the length of prompts is fixed."""
    count = configs.of("transformer", video_length=16).positive_int("video_length", 1024)
    frames = count, count, "the only number of the model"
    return {"unused_parameters": ("max_sequence_length",), "frames": frames}


def _kandinsky5_facts(configs: Configs) -> CheckpointFacts:
    reason = "as sparse attention needs kernels of CUDA, and was never compared"
    transformer = configs.of("transformer", attention_type="regular")
    transformer.require("attention_type", "regular", reason)
    return {}


def _check_kandinsky5(_: Any, sampling: Any) -> None:
    """Refuses few frames: the pipeline adapts the first four latent frames to those that follow."""
    enough = not sampling.from_image or sampling.num_frames >= 17
    require(
        enough,
        f"--frames must be at least 17 from an image, got {sampling.num_frames}",
        frames=sampling.num_frames,
        lowest=17,
    )


def _all_steps(sampling: Any) -> dict[str, int]:
    """All steps; the pipeline leaves out the first ones, and a clip's are those that run."""
    steps, strength = sampling.num_inference_steps, sampling.strength
    fewest = max(steps, int(steps / strength) - 1)
    found = (total for total in itertools.count(fewest) if int(total * strength) >= steps)
    return {"num_inference_steps": next(found)}


def _check_strength(_: Any, sampling: Any) -> None:
    (total,) = _all_steps(sampling).values()
    require(
        total <= MAX_STEPS,
        f"--steps {sampling.num_inference_steps} are the last of {total} for --param strength="
        f"{sampling.strength:g}, and the limit is {MAX_STEPS}",
        "use fewer --steps or more strength",
        steps=sampling.num_inference_steps,
        all_steps=total,
        strength=sampling.strength,
        highest=MAX_STEPS,
    )


# Channels and frames of latents, as the `prepare_latents` of each pipeline counts them.


def _vae_channels(pipe: Any) -> int:
    """Channels of Wan's VAE; from an image, the denoiser takes those of the image as well."""
    return int(pipe.vae.config.z_dim)


def _svd_channels(pipe: Any) -> int:
    """Half of the UNet's, whose others are the image's."""
    return int(pipe.unet.config.in_channels) // 2


def _cogvideox_channels(pipe: Any) -> int:
    """Those of the VAE; from an image, the denoiser takes twice as many."""
    return int(pipe.vae.config.latent_channels)


def _kandinsky5_channels(pipe: Any) -> int:
    """Those of the latent, of the image, and of a mask: three parts of one tensor."""
    channels = int(pipe.transformer.config.in_visual_dim)
    return 2 * channels + 1 if pipe.transformer.config.visual_cond else channels


def _cogvideox_frames(pipe: Any, _: Any, frames: int) -> int:
    """Whole patches: CogVideoX 1.5 adds frames, and cuts them off before the decode."""
    size = pipe.transformer.config.patch_size_t or 1
    return -(-frames // size) * size


def _with_reference(_: Any, sampling: Any, frames: int) -> int:
    """One more, in front, for the image."""
    return frames + 1 if sampling.from_image else frames


# The families.

_LTX = FamilySpec(
    *("LTX-Video", "LTXVideoTransformer3DModel", "LTXPipeline", "LTXImageToVideoPipeline"),
    branches="batch",
    text_and_image=True,
    initial_latent_source="latents",
    num_results_equal_latents=1,
    checkpoint_facts=_ltx_facts,
    check_sampling=_check_ltx,
    generator_device=ltx_generator_device,
)

_WAN = FamilySpec(
    *("Wan 2.1 and 2.2", "WanTransformer3DModel", "WanPipeline", "WanImageToVideoPipeline"),
    branches="calls",
    schedulers=_FLOW,
    denoisers=("transformer", "transformer_2"),
    fp32_components=frozenset({"vae", "image_encoder"}),
    latent_channels=_vae_channels,
    latent_dtype="stepped",
    checkpoint_facts=_wan_facts,
    check_sampling=_check_wan,
)

_VACE = replace(
    _WAN,
    title="Wan VACE, whose image is a reference",
    text_pipeline="WanVACEPipeline",
    image_pipeline="WanVACEPipeline",
    image_argument="reference_images",
    text_and_image=True,
    denoiser="WanVACETransformer3DModel",
    encode_components=("tokenizer", "text_encoder", "vae"),
    latent_frames=_with_reference,
)

_COGVIDEOX = FamilySpec(
    *("CogVideoX", "CogVideoXTransformer3DModel"),
    *("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"),
    branches="batch",
    schedulers=("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
    latent_channels=_cogvideox_channels,
    latent_frames=_cogvideox_frames,
    latent_dtype="model",
)

_SKYREELS = FamilySpec(
    *("SkyReels-V2", "SkyReelsV2Transformer3DModel"),
    *("SkyReelsV2Pipeline", "SkyReelsV2ImageToVideoPipeline"),
    branches="calls",
    checkpoint_facts=_image_projection,
    schedulers=_FLOW,
    fp32_components=frozenset({"vae", "image_encoder"}),
    latent_channels=_vae_channels,
    latent_dtype="stepped",
)

_ANIMATE = replace(
    _WAN,
    title="Wan Animate, whose character moves as the one in videos",
    text_pipeline=None,
    image_pipeline="WanAnimatePipeline",
    denoiser="WanAnimateTransformer3DModel",
    record_uses={
        "video_processor.preprocess_video": 1,  # of the face, which steps encode
        "video_processor_for_mask.preprocess_video": "unused",
        "vae_image_processor.preprocess": "unused",
    },
    frame_limits=(5, 77, "one segment of the model"),  # to begin another, the pipeline decodes it
    latent_frames=_with_reference,
)

FAMILY_SPECS: Mapping[str, FamilySpec] = {
    "svd": FamilySpec(
        *("Stable Video Diffusion", "UNetSpatioTemporalConditionModel"),
        *(None, "StableVideoDiffusionPipeline"),
        branches="batch",
        takes_prompt=False,
        schedulers=("EulerDiscreteScheduler",),
        denoisers=("unet",),
        encode_components=("feature_extractor", "image_encoder"),
        num_results_equal_latents=1,
        latent_channels=_svd_channels,
        latent_dtype="model",
        decodes_in_chunks=True,
        memory_options=True,
        checkpoint_facts=_svd_facts,
        resizes_early=True,
        loras=False,
    ),
    "wan": _WAN,
    "wan_vace": _VACE,
    "wan_vace_control": replace(
        _VACE,
        title="Wan VACE, controlled by a video",
        text_pipeline=None,
        image_argument="video",
        aliases=("WanVACEPipeline",),
        text_and_image=False,
        latent_frames=lambda _, __, frames: frames,
    ),
    "wan_v2v": replace(
        _WAN,
        title="Wan 2.1 from a video",
        text_pipeline=None,
        image_pipeline="WanVideoToVideoPipeline",
        image_argument="video",
        aliases=("WanPipeline",),
        checkpoint_facts=_wan_from_video_facts,
        check_sampling=_check_wan_video,
        call_arguments=_all_steps,
    ),
    "wan_animate": _ANIMATE,
    "wan_replace": replace(
        _ANIMATE,
        title="Wan Animate, whose character replaces the one in a video",
        aliases=("WanAnimatePipeline",),
        call_arguments=lambda _: {"mode": "replace"},
    ),
    "ltx": _LTX,
    "ltx_condition": replace(
        _LTX,
        title="LTX-Video 0.9.5 and later, whose image is a condition",
        text_pipeline="LTXConditionPipeline",
        image_pipeline="LTXConditionPipeline",
        record_uses={"add_noise_to_image_conditioning_latents": "first step"},
        initial_latent_source="noise",
        generator_device=lambda *_: "cpu",
    ),
    "ltx2": FamilySpec(
        *("LTX-2", "LTX2VideoTransformer3DModel", "LTX2Pipeline", "LTX2ImageToVideoPipeline"),
        text_and_image=True,
        encode_components=("tokenizer", "text_encoder", "connectors"),
        decode_components=("vae", "audio_vae", "vocoder"),
        record_uses={"encode_prompt": "unused", "prepare_audio_latents": "first step"},
        initial_latent_source="latents",
        num_results_equal_latents=1,
        call_arguments=_ltx2_arguments,
        checkpoint_facts=_ltx2_facts,
    ),
    "hunyuan_video": FamilySpec(
        *("HunyuanVideo", "HunyuanVideoTransformer3DModel"),
        *("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline"),
        encode_components=_TWO_ENCODERS,
        num_results_equal_latents=1,
        latent_dtype="stepped from text",  # before the step's, the image's latent is float32
        checkpoint_facts=_hunyuan_video_facts,
    ),
    "framepack": FamilySpec(
        *("FramePack", "HunyuanVideoFramepackTransformer3DModel"),
        *(None, "HunyuanVideoFramepackPipeline"),
        encode_components=_TWO_ENCODERS,
        frame_limits=(1 + _FRAMEPACK_CHUNK, MAX_FRAMES, "all that svdpp makes in chunks"),
        latent_frames=lambda *_: _FRAMEPACK_LATENT,
        check_sampling=_check_framepack,
        call_arguments=_framepack_arguments,
    ),
    "hunyuan_video_15": FamilySpec(
        *("HunyuanVideo-1.5", "HunyuanVideo15Transformer3DModel"),
        *("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
        branches="calls",
        encode_components=_TWO_ENCODERS,
        shared_components=("guider",),
        latent_channels=lambda pipe: int(pipe.num_channels_latents),
        latent_dtype="model",
        loras=False,
        size_from_image=True,
        checkpoint_facts=_hunyuan_video_15_facts,
        check_sampling=_check_hunyuan_video_15,
    ),
    "cogvideox": _COGVIDEOX,
    "cogvideox_v2v": replace(
        _COGVIDEOX,
        title="CogVideoX from a video",
        text_pipeline=None,
        image_pipeline="CogVideoXVideoToVideoPipeline",
        image_argument="video",
        aliases=("CogVideoXPipeline",),
        check_sampling=_check_strength,
        call_arguments=_all_steps,
    ),
    "skyreels_v2": _SKYREELS,
    "skyreels_v2_df": replace(
        _SKYREELS,
        title="SkyReels-V2, diffusion forcing with all frames in step",
        text_pipeline="SkyReelsV2DiffusionForcingPipeline",
        image_pipeline=None,
        # Its pipeline gives each frame a timestep of its own, which Euler's `step` does not take.
        schedulers=("UniPCMultistepScheduler",),
        initial_latent_source="latents",
        num_results_equal_latents=1_000,  # all
        frame_limits=(1, 97, "the model makes more in several loops"),
    ),
    "kandinsky5": FamilySpec(
        *("Kandinsky 5", "Kandinsky5Transformer3DModel"),
        *("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline"),
        branches="calls",
        text_and_image=True,
        encode_components=_TWO_ENCODERS,
        initial_latent_source="latents",
        num_results_equal_latents=1,
        latent_channels=_kandinsky5_channels,
        latent_dtype="model",
        checkpoint_facts=_kandinsky5_facts,
        check_sampling=_check_kandinsky5,
    ),
    "mochi": FamilySpec(
        *("Mochi 1", "MochiTransformer3DModel", "MochiPipeline"),
        branches="batch",
        latent_dtype="model",
    ),
    "latte": FamilySpec(
        *("Latte", "LatteTransformer3DModel", "LattePipeline"),
        branches="batch",
        schedulers=("DDIMScheduler",),
        loras=False,
        num_results_equal_latents=1,
        latent_dtype="model",
        checkpoint_facts=_latte_facts,
    ),
}

#: The family of each pipeline.
FAMILY_OF_PIPELINE: Mapping[str, str] = {
    pipeline: family
    for family, spec in FAMILY_SPECS.items()
    for pipeline in (spec.text_pipeline, spec.image_pipeline)
    if pipeline is not None and pipeline not in spec.aliases
}
