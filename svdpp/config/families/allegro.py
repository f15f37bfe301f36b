"""Sampling parameters and spec of Allegro, whose VAE decodes in tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from svdpp.config.families.spec import (
    CheckedCheckpoint,
    CheckpointConfigs,
    CheckpointFacts,
    FamilySpec,
)
from svdpp.config.limits import MAX_FRAMES, require
from svdpp.config.sampling import PromptedSampling

# `AutoencoderKLAllegro` decodes a clip in tiles that overlap. A tile has `_TILE_FRAMES` frames, of
# which it shares `_SHARED_FRAMES` with the next tile.
_TILE_FRAMES, _SHARED_FRAMES = 24, 8
# Number of pixels by which two neighbouring tiles overlap, in each direction.
_SHARED_PIXELS = {"height": 120, "width": 80}


@dataclass(frozen=True, kw_only=True)
class AllegroSampling(PromptedSampling):
    """Sampling parameters of diffusers' `AllegroPipeline`, with its defaults."""

    side_unit: ClassVar[int] = 16

    family: Literal["allegro"] = "allegro"
    num_inference_steps: int = 100
    height: int = 720
    width: int = 1280
    num_frames: int = 88
    fps: float = 15
    guidance_scale: float = 7.5
    max_sequence_length: int = 512


def _checkpoint_facts(configs: CheckpointConfigs) -> CheckpointFacts:
    vae = configs.of("vae", sample_size=320, temporal_compression_ratio=4)
    vae.require("temporal_compression_ratio", 4, "because svdpp knows only tiles of 24 frames")
    return {
        "vae_tile_side": vae.positive_int("sample_size", 2**12),
        "frames": (_TILE_FRAMES, MAX_FRAMES, "as the VAE decodes tiles of 24 frames"),
    }


def _check_sampling(checkpoint: CheckedCheckpoint, sampling: Any) -> None:
    """Raise a `RequestError` unless a clip consists of whole tiles of Allegro's VAE.

    The VAE decodes only whole tiles, so all pixels outside of them would be black.

    Raises:
        RequestError: The number of frames, the height or the width does not fit whole tiles. The
            hint names the nearest values that fit.
    """
    side = checkpoint.vae_tile_side
    assert side is not None
    _check_covered("num_frames", sampling.num_frames, _TILE_FRAMES, _SHARED_FRAMES)
    for name, shared in _SHARED_PIXELS.items():
        _check_covered(name, getattr(sampling, name), side, shared)


def _check_covered(name: str, size: int, tile: int, shared: int) -> None:
    step = tile - shared
    below = max(tile, tile + (size - tile) // step * step)
    require(
        size == below,
        f"`{name}` must be {tile} plus a multiple of {step}, got {size}: the VAE decodes tiles of "
        f"{tile}, and leaves the rest black",
        f"use `{name}` {below} or `{name}` {below + step}",
        field=name,
        value=size,
        tile=tile,
        step=step,
        nearest=[below, below + step],
    )


ALLEGRO = FamilySpec(
    sampling=AllegroSampling,
    title="Allegro",
    example="rhymes-ai/Allegro",
    license="Apache-2.0",
    denoiser="AllegroTransformer3DModel",
    text_pipeline="AllegroPipeline",
    schedulers=("EulerAncestralDiscreteScheduler",),
    needs_vae_tiling=True,
    fp32_components=frozenset({"vae"}),
    loras=False,
    num_results_equal_latents=1,
    branches="batch",
    batched_arguments=frozenset(
        {"hidden_states", "encoder_hidden_states", "encoder_attention_mask", "timestep"}
    ),
    latent_dtype="model",
    checkpoint_facts=_checkpoint_facts,
    check_sampling=_check_sampling,
    # By default, diffusers cleans prompts if the package beautifulsoup4 is installed. The same
    # request would then give different clips on machines with and without this package.
    call_arguments=lambda _: {"clean_caption": False},
)

FAMILIES = (ALLEGRO,)
