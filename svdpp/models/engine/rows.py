"""The rows: what is special about each family of diffusers' pipelines; knows no torch.

`docs/new-model.md` says how to add one. What a row does not say is the same for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from svdpp.models.engine import hunyuan, ltx, others, svd, wan
from svdpp.models.engine.configs import Configs, Facts

_TWO_ENCODERS = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
_FLOW = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One family."""

    title: str
    text: str | None = None
    """The pipeline's class for clips from text alone."""
    image: str | None = None
    """The pipeline's class for clips from an image."""
    image_argument: str = "image"
    """Of `__call__`, for that image, or for the frames of a video."""
    also: tuple[str, ...] = ()
    """Other pipelines whose checkpoints the family runs if it is asked for by name."""
    size_from_image: bool = False
    """Whether the image's shape sets the clip's size; the image is then resized to it first."""
    both: bool = False
    """Whether a checkpoint of either class has all components of the other one."""
    denoiser: str
    """The class of the denoisers: others may keep state that no packet carries."""
    takes_prompt: bool = True
    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    denoisers: tuple[str, ...] = ("transformer",)
    encode: tuple[str, ...] = ("tokenizer", "text_encoder")
    """What an encode uses."""
    encode_image: tuple[str, ...] = ("vae",)
    """What it uses besides for a clip from an image."""
    decode: tuple[str, ...] = ("vae",)
    vocoder: str | None = None
    """The component that makes the samples of the clip's sound."""
    everywhere: tuple[str, ...] = ()
    """What every rank uses: components without weights."""
    fp32: frozenset[str] = frozenset()
    """Components in float32, whatever the model's dtype is."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Arguments of `__call__` by the sampling parameter they have; others have its name."""
    texts: tuple[str, ...] = ("_get_t5_prompt_embeds",)
    """Methods whose results depend on their arguments alone, and are kept for the next prompts."""
    loras: bool = True
    """Whether diffusers' pipeline loads LoRAs."""
    unsent: frozenset[str] = frozenset(
        {"video_processor.preprocess", "video_processor.preprocess_video"}
    )
    """Records that steps and decode do not use."""
    sent_calls: Mapping[str, int] = field(default_factory=dict)
    """Of a record among these that is made several times, the one, from 0, that they use."""
    noise_use: Literal["first_step", "in_latents", "later_steps"] = "first_step"
    """Which steps use the first latent. `in_latents`: later steps use parts of it which no step
    changes, so that ranks find them in the latent."""
    only_first_step: frozenset[str] = frozenset()
    """Further records that only the first step uses."""
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
    facts: Callable[[Configs], Facts] = lambda _: {}
    """What the configs of a checkpoint say; refuses what the row does not cover."""
    check: Callable[[Any, Any], None] = lambda *_: None
    """Refuses sampling parameters (second) that diffusers cannot run with a checkpoint (first)."""
    arguments: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    """Arguments of `__call__` that are not sampling parameters, from those that are."""
    generator_device: Callable[[Any, Any, str], str] = lambda *_: "cpu"
    """Where noise is drawn: the CPU if diffusers accepts that: all devices give the same clip."""
    prepare: Callable[[Any, Any, Any], Any] | None = None
    """Does what needs no device of an image's encode: of pipeline, image, sampling parameters."""
    prepared: Callable[[Any, Any], AbstractContextManager[None]] = lambda *_: nullcontext()
    """While it lasts, the pipeline uses what `prepare` has made."""
    old_packet: Callable[[Any, Any, int], Any] | None = None
    """Structure and tensors of an earlier version's packet: of tensors, sampling, steps run."""

    @property
    def parts(self) -> frozenset[str]:
        """The components that a rank may need."""
        return self.required.union(self.encode_image, self.denoisers)

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
    title="LTX-Video",
    branches="batch",
    text="LTXPipeline",
    image="LTXImageToVideoPipeline",
    both=True,
    denoiser="LTXVideoTransformer3DModel",
    renamed={"frame_rate": "fps"},
    noise_use="in_latents",
    results_in_latents=1,
    facts=ltx.facts,
    check=ltx.check,
    generator_device=ltx.generator_device,
)

_VACE = Row(
    title="Wan VACE, whose image is a reference",
    branches="calls",
    text="WanVACEPipeline",
    image="WanVACEPipeline",
    denoiser="WanVACETransformer3DModel",
    schedulers=_FLOW,
    denoisers=("transformer", "transformer_2"),
    encode=("tokenizer", "text_encoder", "vae"),
    image_argument="reference_images",
    fp32=frozenset({"vae"}),
    unsent=frozenset({"video_processor.preprocess", "preprocess_conditions"}),
    facts=wan.vace_facts,
    check=wan.check,
)

_ANIMATE = Row(
    title="Wan Animate, whose character moves as the one in videos",
    branches="calls",
    image="WanAnimatePipeline",
    denoiser="WanAnimateTransformer3DModel",
    schedulers=_FLOW,
    encode_image=("vae", "image_encoder", "image_processor"),
    fp32=frozenset({"vae", "image_encoder"}),
    renamed={"segment_frame_length": "num_frames"},
    unsent=frozenset(
        {
            *("video_processor.preprocess_video", "video_processor_for_mask.preprocess_video"),
            "vae_image_processor.preprocess",
        }
    ),
    sent_calls={"video_processor.preprocess_video": 1},  # of the face, which steps encode
    facts=wan.animate_facts,
    check=wan.check_animate,
)

ROWS: Mapping[str, Row] = {
    "svd": Row(
        title="Stable Video Diffusion",
        branches="batch",
        image="StableVideoDiffusionPipeline",
        denoiser="UNetSpatioTemporalConditionModel",
        takes_prompt=False,
        schedulers=("EulerDiscreteScheduler",),
        denoisers=("unet",),
        encode=("feature_extractor", "image_encoder"),
        texts=(),
        results_in_latents=1,
        decodes_in_chunks=True,
        memory_options=True,
        facts=svd.facts,
        prepare=svd.prepare,
        prepared=svd.prepared,
        old_packet=svd.old_packet,
        loras=False,
    ),
    "wan": Row(
        title="Wan 2.1 and 2.2",
        branches="calls",
        text="WanPipeline",
        image="WanImageToVideoPipeline",
        denoiser="WanTransformer3DModel",
        schedulers=_FLOW,
        denoisers=("transformer", "transformer_2"),
        encode_image=("vae", "image_encoder", "image_processor"),
        fp32=frozenset({"vae", "image_encoder"}),
        facts=wan.facts,
        check=wan.check,
    ),
    "wan_vace": _VACE,
    "wan_vace_control": replace(
        _VACE,
        title="Wan VACE, controlled by a video",
        text=None,
        image_argument="video",
        also=("WanVACEPipeline",),
        facts=lambda configs: {**wan.facts(configs), "image_use": "needed"},
    ),
    "wan_v2v": Row(
        title="Wan 2.1 from a video",
        branches="calls",
        image="WanVideoToVideoPipeline",
        image_argument="video",
        also=("WanPipeline",),
        denoiser="WanTransformer3DModel",
        schedulers=_FLOW,
        fp32=frozenset({"vae"}),
        facts=wan.video_facts,
        check=wan.check_video,
        arguments=others.all_steps,
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
        only_first_step=frozenset({"add_noise_to_image_conditioning_latents"}),
        noise_use="later_steps",
        generator_device=lambda *_: "cpu",
    ),
    "ltx2": Row(
        title="LTX-2",
        text="LTX2Pipeline",
        image="LTX2ImageToVideoPipeline",
        both=True,
        denoiser="LTX2VideoTransformer3DModel",
        encode=("tokenizer", "text_encoder", "connectors"),
        decode=("vae", "audio_vae", "vocoder"),
        vocoder="vocoder",
        renamed={"frame_rate": "fps"},
        texts=("_get_gemma_prompt_embeds",),
        unsent=frozenset({"video_processor.preprocess", "encode_prompt"}),
        only_first_step=frozenset({"prepare_audio_latents"}),
        noise_use="in_latents",
        results_in_latents=1,
        arguments=ltx.arguments_2,
        facts=ltx.facts_2,
    ),
    "hunyuan_video": Row(
        title="HunyuanVideo",
        text="HunyuanVideoPipeline",
        image="HunyuanVideoImageToVideoPipeline",
        denoiser="HunyuanVideoTransformer3DModel",
        encode=_TWO_ENCODERS,
        encode_image=("vae", "image_processor"),
        texts=("_get_llama_prompt_embeds", "_get_clip_prompt_embeds"),
        results_in_latents=1,
        facts=hunyuan.facts,
    ),
    "framepack": Row(
        title="FramePack",
        image="HunyuanVideoFramepackPipeline",
        denoiser="HunyuanVideoFramepackTransformer3DModel",
        encode=_TWO_ENCODERS,
        encode_image=("vae", "image_encoder", "feature_extractor"),
        texts=("_get_llama_prompt_embeds", "_get_clip_prompt_embeds"),
        check=hunyuan.check_framepack,
        arguments=hunyuan.framepack_arguments,
    ),
    "hunyuan_video_15": Row(
        title="HunyuanVideo-1.5",
        branches="calls",
        text="HunyuanVideo15Pipeline",
        image="HunyuanVideo15ImageToVideoPipeline",
        denoiser="HunyuanVideo15Transformer3DModel",
        encode=_TWO_ENCODERS,
        encode_image=("vae", "image_encoder", "feature_extractor"),
        everywhere=("guider",),
        texts=(),
        loras=False,
        size_from_image=True,
        facts=hunyuan.facts_15,
        check=hunyuan.check_15,
    ),
    "cogvideox": Row(
        title="CogVideoX",
        branches="batch",
        text="CogVideoXPipeline",
        image="CogVideoXImageToVideoPipeline",
        denoiser="CogVideoXTransformer3DModel",
        schedulers=("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
    ),
    "cogvideox_v2v": Row(
        title="CogVideoX from a video",
        branches="batch",
        image="CogVideoXVideoToVideoPipeline",
        image_argument="video",
        also=("CogVideoXPipeline",),
        denoiser="CogVideoXTransformer3DModel",
        schedulers=("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
        check=others.check_strength,
        arguments=others.all_steps,
    ),
    "skyreels_v2": Row(
        title="SkyReels-V2",
        branches="calls",
        text="SkyReelsV2Pipeline",
        image="SkyReelsV2ImageToVideoPipeline",
        denoiser="SkyReelsV2Transformer3DModel",
        schedulers=_FLOW,
        encode_image=("vae", "image_encoder", "image_processor"),
        fp32=frozenset({"vae", "image_encoder"}),
    ),
    "skyreels_v2_df": Row(
        title="SkyReels-V2, diffusion forcing with all frames in step",
        branches="calls",
        text="SkyReelsV2DiffusionForcingPipeline",
        denoiser="SkyReelsV2Transformer3DModel",
        schedulers=_FLOW,
        fp32=frozenset({"vae"}),
        noise_use="in_latents",
        results_in_latents=1_000,  # all
        check=others.one_window,
    ),
    "kandinsky5": Row(
        title="Kandinsky 5",
        branches="calls",
        text="Kandinsky5T2VPipeline",
        image="Kandinsky5I2VPipeline",
        both=True,
        denoiser="Kandinsky5Transformer3DModel",
        encode=_TWO_ENCODERS,
        texts=("_encode_prompt_qwen", "_encode_prompt_clip"),
        noise_use="in_latents",
        results_in_latents=1,
        facts=others.kandinsky5,
        check=others.kandinsky5_frames,
    ),
    "mochi": Row(
        title="Mochi 1",
        branches="batch",
        text="MochiPipeline",
        denoiser="MochiTransformer3DModel",
    ),
    "latte": Row(
        title="Latte",
        branches="batch",
        text="LattePipeline",
        denoiser="LatteTransformer3DModel",
        schedulers=("DDIMScheduler",),
        renamed={"video_length": "num_frames"},
        texts=(),
        loras=False,
        results_in_latents=1,
        facts=others.latte,
    ),
}

#: The family of each pipeline.
FAMILIES: Mapping[str, str] = {
    pipeline: family
    for family, row in ROWS.items()
    for pipeline in (row.text, row.image)
    if pipeline is not None and pipeline not in row.also
}

_GUARDRAIL = "needs the models of NVIDIA's guardrail, which svdpp does not load"

#: Pipelines that are refused by name, and why.
REFUSED: Mapping[str, str] = {
    "Cosmos2_5_PredictBasePipeline": _GUARDRAIL,
    "Cosmos2VideoToWorldPipeline": _GUARDRAIL,
    "CosmosTextToWorldPipeline": _GUARDRAIL,
    "CosmosVideoToWorldPipeline": _GUARDRAIL,
    "AnyFlowFARPipeline": "has a denoiser that returns a cache, which no packet carries",
}
