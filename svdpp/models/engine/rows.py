"""The rows: what is special about each family of diffusers' pipelines; knows no torch.

`docs/new-model.md` says how to add one. What a row does not say is the same for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

from svdpp.config.limits import MAX_FRAMES
from svdpp.models.engine import families
from svdpp.models.engine.configs import Configs, Facts

#: What an encode of an image uses, as far as a checkpoint has it.
IMAGE_ENCODERS = ("vae", "image_encoder", "image_processor", "feature_extractor")
_TWO_ENCODERS = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
_FLOW = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")


@dataclass(frozen=True)
class Row:
    """One family."""

    title: str
    denoiser: str
    """The class of the denoisers: others may keep state that no packet carries."""
    text: str | None = None
    """The pipeline's class for clips from text alone."""
    image: str | None = None
    """The pipeline's class for clips from an image."""
    _: KW_ONLY
    image_argument: str = "image"
    """Of `__call__`, for that image, or for the frames of a video."""
    also: tuple[str, ...] = ()
    """Other pipelines whose checkpoints the family runs if it is asked for by name."""
    size_from_image: bool = False
    """Whether the image's shape sets the clip's size; the image is then resized to it first."""
    both: bool = False
    """Whether a checkpoint of either class has all components of the other one."""
    takes_prompt: bool = True
    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    denoisers: tuple[str, ...] = ("transformer",)
    encode: tuple[str, ...] = ("tokenizer", "text_encoder")
    """What an encode uses."""
    decode: tuple[str, ...] = ("vae",)
    everywhere: tuple[str, ...] = ()
    """What every rank uses: components without weights."""
    fp32: frozenset[str] = frozenset()
    """Components in float32, whatever the model's dtype is."""
    loras: bool = True
    """Whether diffusers' pipeline loads LoRAs."""
    records: Mapping[str, Literal["unused", "first step"] | int] = field(default_factory=dict)
    """Who uses a record but not all steps and the decode: none, as of images before they are
    encoded, or the first step alone; of several with one name, the number of the one in use."""
    noise: str | None = None
    """Tensor of later packets that gives their steps the first latent. `latents`: they use parts
    which no step changes; None: only the first step uses it."""
    results_in_latents: int = 0
    """Of how many schedulers, by their first steps, the results are part of the latent; these do
    not travel."""
    branches: Literal["calls", "batch"] | None = None
    """A guided step evaluates its two branches by two calls whose results are used after both, or
    by one call with a batch of two, which two ranks may round differently; None: otherwise."""
    decodes_in_chunks: bool = False
    """Whether `decode_latents` decodes `decode_chunk_size` frames at a time, each on their own."""
    memory_options: bool = False
    """Whether the denoiser and the VAE take `memory_opt` and `channels_last`."""
    frames: tuple[int, int, str] = (1, MAX_FRAMES, "all that svdpp makes")
    """The fewest and most of a clip, and why."""
    facts: Callable[[Configs], Facts] = lambda _: {}
    """What the configs of a checkpoint say; refuses what the row does not cover."""
    check: Callable[[Any, Any], None] = lambda *_: None
    """Refuses sampling parameters (second) that diffusers cannot run with a checkpoint (first)."""
    arguments: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    """Arguments of `__call__` that are not sampling parameters, from those that are."""
    generator_device: Callable[[Any, Any, str], str] = lambda *_: "cpu"
    """Where noise is drawn: the CPU if diffusers accepts that: all devices give the same clip."""
    resizes_early: bool = False
    """Whether an image is resized before the encode: see `model`."""

    @property
    def parts(self) -> frozenset[str]:
        """The components that a rank may need."""
        return self.required.union(IMAGE_ENCODERS, self.denoisers)

    @property
    def required(self) -> frozenset[str]:
        """Those of `parts` that every checkpoint has."""
        return frozenset((*self.encode, *self.decode, self.denoisers[0], *self.everywhere))

    def pipeline(self, from_image: bool) -> str:
        """The pipeline's class for a clip."""
        name = self.image if from_image else self.text
        assert name is not None
        return name


_LTX = Row(
    *("LTX-Video", "LTXVideoTransformer3DModel", "LTXPipeline", "LTXImageToVideoPipeline"),
    branches="batch",
    both=True,
    noise="latents",
    results_in_latents=1,
    facts=families.ltx,
    check=families.check_ltx,
    generator_device=families.ltx_generator_device,
)

_WAN = Row(
    *("Wan 2.1 and 2.2", "WanTransformer3DModel", "WanPipeline", "WanImageToVideoPipeline"),
    branches="calls",
    schedulers=_FLOW,
    denoisers=("transformer", "transformer_2"),
    fp32=frozenset({"vae", "image_encoder"}),
    facts=families.wan,
    check=families.check_wan,
)

_VACE = replace(
    _WAN,
    title="Wan VACE, whose image is a reference",
    text="WanVACEPipeline",
    image="WanVACEPipeline",
    image_argument="reference_images",
    both=True,
    denoiser="WanVACETransformer3DModel",
    encode=("tokenizer", "text_encoder", "vae"),
)

_COGVIDEOX = Row(
    *("CogVideoX", "CogVideoXTransformer3DModel"),
    *("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"),
    branches="batch",
    schedulers=("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
)

_SKYREELS = Row(
    *("SkyReels-V2", "SkyReelsV2Transformer3DModel"),
    *("SkyReelsV2Pipeline", "SkyReelsV2ImageToVideoPipeline"),
    branches="calls",
    schedulers=_FLOW,
    fp32=frozenset({"vae", "image_encoder"}),
)

_ANIMATE = replace(
    _WAN,
    title="Wan Animate, whose character moves as the one in videos",
    text=None,
    image="WanAnimatePipeline",
    denoiser="WanAnimateTransformer3DModel",
    records={
        "video_processor.preprocess_video": 1,  # of the face, which steps encode
        "video_processor_for_mask.preprocess_video": "unused",
        "vae_image_processor.preprocess": "unused",
    },
    frames=(5, 77, "one segment of the model"),  # to begin another, the pipeline decodes it
)

ROWS: Mapping[str, Row] = {
    "svd": Row(
        *("Stable Video Diffusion", "UNetSpatioTemporalConditionModel"),
        *(None, "StableVideoDiffusionPipeline"),
        branches="batch",
        takes_prompt=False,
        schedulers=("EulerDiscreteScheduler",),
        denoisers=("unet",),
        encode=("feature_extractor", "image_encoder"),
        results_in_latents=1,
        decodes_in_chunks=True,
        memory_options=True,
        facts=families.svd,
        resizes_early=True,
        loras=False,
    ),
    "wan": _WAN,
    "wan_vace": _VACE,
    "wan_vace_control": replace(
        _VACE,
        title="Wan VACE, controlled by a video",
        text=None,
        image_argument="video",
        also=("WanVACEPipeline",),
        both=False,
    ),
    "wan_v2v": replace(
        _WAN,
        title="Wan 2.1 from a video",
        text=None,
        image="WanVideoToVideoPipeline",
        image_argument="video",
        also=("WanPipeline",),
        facts=families.wan_from_video,
        check=families.check_wan_video,
        arguments=families.all_steps,
    ),
    "wan_animate": _ANIMATE,
    "wan_replace": replace(
        _ANIMATE,
        title="Wan Animate, whose character replaces the one in a video",
        also=("WanAnimatePipeline",),
        arguments=lambda _: {"mode": "replace"},
    ),
    "ltx": _LTX,
    "ltx_condition": replace(
        _LTX,
        title="LTX-Video 0.9.5 and later, whose image is a condition",
        text="LTXConditionPipeline",
        image="LTXConditionPipeline",
        records={"add_noise_to_image_conditioning_latents": "first step"},
        noise="noise",
        generator_device=lambda *_: "cpu",
    ),
    "ltx2": Row(
        *("LTX-2", "LTX2VideoTransformer3DModel", "LTX2Pipeline", "LTX2ImageToVideoPipeline"),
        both=True,
        encode=("tokenizer", "text_encoder", "connectors"),
        decode=("vae", "audio_vae", "vocoder"),
        records={"encode_prompt": "unused", "prepare_audio_latents": "first step"},
        noise="latents",
        results_in_latents=1,
        arguments=families.ltx2_arguments,
        facts=families.ltx2,
    ),
    "hunyuan_video": Row(
        *("HunyuanVideo", "HunyuanVideoTransformer3DModel"),
        *("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline"),
        encode=_TWO_ENCODERS,
        results_in_latents=1,
        facts=families.hunyuan_video,
    ),
    "framepack": Row(
        *("FramePack", "HunyuanVideoFramepackTransformer3DModel"),
        *(None, "HunyuanVideoFramepackPipeline"),
        encode=_TWO_ENCODERS,
        check=families.check_framepack,
        arguments=families.framepack_arguments,
    ),
    "hunyuan_video_15": Row(
        *("HunyuanVideo-1.5", "HunyuanVideo15Transformer3DModel"),
        *("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
        branches="calls",
        encode=_TWO_ENCODERS,
        everywhere=("guider",),
        loras=False,
        size_from_image=True,
        facts=families.hunyuan_video_15,
        check=families.check_hunyuan_video_15,
    ),
    "cogvideox": _COGVIDEOX,
    "cogvideox_v2v": replace(
        _COGVIDEOX,
        title="CogVideoX from a video",
        text=None,
        image="CogVideoXVideoToVideoPipeline",
        image_argument="video",
        also=("CogVideoXPipeline",),
        check=families.check_strength,
        arguments=families.all_steps,
    ),
    "skyreels_v2": _SKYREELS,
    "skyreels_v2_df": replace(
        _SKYREELS,
        title="SkyReels-V2, diffusion forcing with all frames in step",
        text="SkyReelsV2DiffusionForcingPipeline",
        image=None,
        noise="latents",
        results_in_latents=1_000,  # all
        frames=(1, 97, "the model makes more in several loops"),
    ),
    "kandinsky5": Row(
        *("Kandinsky 5", "Kandinsky5Transformer3DModel"),
        *("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline"),
        branches="calls",
        both=True,
        encode=_TWO_ENCODERS,
        noise="latents",
        results_in_latents=1,
        facts=families.kandinsky5,
        check=families.kandinsky5_frames,
    ),
    "mochi": Row("Mochi 1", "MochiTransformer3DModel", "MochiPipeline", branches="batch"),
    "latte": Row(
        *("Latte", "LatteTransformer3DModel", "LattePipeline"),
        branches="batch",
        schedulers=("DDIMScheduler",),
        loras=False,
        results_in_latents=1,
        facts=families.latte,
    ),
}

#: The family of each pipeline.
FAMILIES: Mapping[str, str] = {
    pipeline: family
    for family, row in ROWS.items()
    for pipeline in (row.text, row.image)
    if pipeline is not None and pipeline not in row.also
}

_COSMOS = (
    *("Cosmos2_5_PredictBasePipeline", "Cosmos2VideoToWorldPipeline"),
    *("CosmosTextToWorldPipeline", "CosmosVideoToWorldPipeline"),
)

#: Pipelines that are refused by name, and why.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(_COSMOS, "needs the models of NVIDIA's guardrail, which svdpp does not load"),
    "AnyFlowFARPipeline": "has a denoiser that returns a cache, which no packet carries",
}
