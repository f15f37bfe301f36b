"""Ranks that share a step or a decode, and ranks with two experts, give the bits of diffusers."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import (
    ClipRequest,
    LtxSampling,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    WanSampling,
)
from svdpp.config.families.hunyuan_video import HunyuanVideoSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.request_scheduler import RequestScheduler
from svdpp.driver.resolve import resolve_config
from svdpp.errors import NotFiniteError, RankError, RequestError
from svdpp.media.inputs import example_images
from svdpp.models.base import DTYPES
from svdpp.plan.actions import Kind
from svdpp.plan.costs import CostModel
from svdpp.plan.parallel import layout_fields
from svdpp.verification.verify import verify
from tests.support.builders import small_svd
from tests.support.damage import Damage
from tests.support.dummies import clips, hashes, plain_hashes
from tests.support.dummies import config as dummy
from tests.support.tiny_families import save_tiny, save_tiny_ltx, save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")

WAN: dict[str, Any] = {
    **{"num_inference_steps": 6, "height": 32, "width": 32, "num_frames": 5},
    "max_sequence_length": 8,
}
LTX: dict[str, Any] = {**WAN, "height": 64, "width": 64, "num_frames": 9}
REQUESTS = [
    ClipRequest(seed=1, prompt="the sea at night"),
    ClipRequest(seed=2, prompt="a cat", negative_prompt="blurred"),
    ClipRequest(seed=3, prompt="the sea at night"),
]
PHOTO = str(example_images()[0])
KEY = "ab" * 32
MORE = [pytest.mark.slow, pytest.mark.full]

#: By model: options to save the model, and whether clips are made from an image.
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "t2v-two-experts": ({"boundary_ratio": 0.875}, False),
    "i2v": ({"image": True}, True),
    "5b": ({"expand_timesteps": True}, False),
}


PAIRED = ParallelConfig(cfg_parallel_size=2)


def config_of(
    name: str, folder: Path, dtype: Any = "fp32", world_size: int = 2, **options: Any
) -> PipelineConfig:
    """Save a tiny Wan, and return a pipeline configuration for it, by default with CFG pairs."""
    saved, from_image = MODELS[name]
    save_tiny_wan(folder, **saved, dtype=DTYPES[dtype])
    return PipelineConfig(
        model=ModelConfig(name=str(folder), dtype=dtype),
        sampling=WanSampling(**WAN, from_image=from_image),
        world_size=world_size,
        parallel=ParallelConfig(**layout_fields({"cfg_parallel": 2, **options})),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        ("t2v-two-experts", "fp32", {"world_size": 4, "split": "alternating"}),
        pytest.param("i2v", "bf16", {"world_size": 4, "replicas": 2}, marks=MORE),
        pytest.param("5b", "fp32", {"share_experts": False}, marks=MORE),
        ("t2v-two-experts", "fp32", {"cfg_parallel": 1, "share_experts": True}),
        ("t2v-two-experts", "fp32", {"cfg_parallel": 1, "world_size": 3, "split": "alternating"}),
        *(
            pytest.param(name, dtype, {"world_size": world_size, **layout}, marks=MORE)
            for name in MODELS
            for dtype, world_size, layout in (
                *(("fp32", 2, {}), ("bf16", 2, {}), ("bf16", 4, {"share_experts": True})),
                *(("bf16", 4, {"split": "balanced"}), ("fp32", 4, {"split": "alternating"})),
                ("fp32", 6, {"split": "balanced", "decoders": 1 if "two" in name else 2}),
            )
        ),
    ],
)
def test_verify_finds_equal_bits(
    tmp_path: Path, name: str, dtype: str, layout: dict[str, Any]
) -> None:
    config, _ = resolve_config(config_of(name, tmp_path, dtype, **layout))
    image = PHOTO if MODELS[name][1] else None
    result = verify(config, [replace(each, image=image) for each in REQUESTS])
    assert result.bitwise
    assert {check.what for check in result.checks} == {"latent", "final_latent", "frames"} - (
        {"latent"} if config.layout.num_stages == 1 else set()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "kind", "rank", "words"),
    [
        *(
            ("5b", {"world_size": 4}, "prediction", 2 + branch, f"branch {branch} in step 3")
            for branch in (0, 1)
        ),
        (
            "t2v-two-experts",
            {"world_size": 3, "cfg_parallel": 1, "split": "balanced"},
            *("state", 0, "the solver's history"),
        ),
    ],
)
def test_verify_names_what_differs_first(
    tmp_path: Path, name: str, layout: dict[str, Any], kind: str, rank: int, words: str
) -> None:
    config = config_of(name, tmp_path, **layout)
    first = verify(config, REQUESTS[:1], fault=Damage(kind, rank, 0)).first_difference
    assert first is not None
    assert (first.rank, first.max_ulp) == (rank, 1)
    assert words in str(first)
    assert f"computed by rank {rank}" in str(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        "half of one rank",
        pytest.param("half of a pair", marks=pytest.mark.full),
        pytest.param("the decode", marks=pytest.mark.full),
    ],
)
def test_a_clip_resumes_in_another_layout(tmp_path: Path, lost: str) -> None:
    """A clip that one rank began is continued by a CFG pair, or a pair's clip by one rank.

    If only the decode is missing, both ranks of the pair decode.
    """
    if lost == "the decode":
        whole, request = svd_config(1), ClipRequest(seed=1, image=PHOTO)
        costs = CostModel(step_seconds=1, decode_seconds=100)
        first, again = (
            svd_config(2, parallel=ParallelConfig(split="balanced"), costs=costs),
            svd_config(2, parallel=PAIRED),
        )
        until = str(tmp_path / f"latents/{KEY}_step4.safetensors")
        fault = Damage("raise", 1, 0, place="decode", until=until)
    else:
        size = 1 if lost == "half of one rank" else 2
        whole = config_of(
            "t2v-two-experts",
            tmp_path / "model",
            world_size=1,
            cfg_parallel=1,
        )
        first = replace(whole, world_size=2 * size, parallel=ParallelConfig(cfg_parallel_size=size))
        again = replace(
            whole, world_size=3 - size, parallel=ParallelConfig(cfg_parallel_size=3 - size)
        )
        request, fault = REQUESTS[0], Damage("nan", size, 0)
    latents = tmp_path / "latents"
    latents.mkdir()
    request = replace(request, latents_key=KEY)
    with Pipeline(whole) as pipeline:
        expected = pipeline.submit(request).result().metadata
    with (
        contextlib.suppress(RankError),
        Pipeline(first, latents_folder=str(latents), fault=fault) as pipeline,
    ):
        assert pipeline.submit(request).exception() is not None
    (kept,) = latents.iterdir()
    done = int(kept.stem.rpartition("step")[2])
    with Pipeline(again, latents_folder=str(latents)) as pipeline:
        found = pipeline.submit(replace(request, done_steps=done)).result().metadata
    assert found["latents_sha256"] == expected["latents_sha256"]
    assert found["frames_sha256"] == expected["frames_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["svd", pytest.param("svd in bf16", marks=MORE), "ltx"])
def test_the_halves_of_a_batch_are_close_but_not_exact(tmp_path: Path, model: str) -> None:
    config, request = (
        small_svd(2, parallel=PAIRED),
        replace(REQUESTS[0], image=PHOTO, prompt=None),
    )
    if model == "svd in bf16":
        config = replace(config, model=replace(config.model, dtype="bf16"))
    elif model == "ltx":
        request = REQUESTS[0]
        saved = ModelConfig(name=str(save_tiny_ltx(tmp_path)))
        config = replace(config, model=saved, sampling=LtxSampling(**LTX))
    with Pipeline(config) as pipeline:
        assert pipeline.submit(request).result().metadata["exact"] == "unproven"
    result = verify(config, [request], atol=0.05)
    assert result.verdict in ("bitwise equal", "within tolerance")
    assert model != "ltx" or result.max_abs_diff <= 2 / 255
    (latent,) = (check for check in result.checks if check.what == "final_latent")
    assert latent.bitwise or (latent.psnr_db is not None and latent.psnr_db > 80)


#: Sampling parameters with which a clip is decoded in two chunks of one frame each.
CHUNKS = replace(dummy(steps=8).sampling, decode_chunk_size=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, {"cfg_parallel": 2}),
        (2, {"cfg_parallel": 2, "sampling": CHUNKS}),
        (2, {"decode_ranks": 2, "sampling": CHUNKS}),
    ],
    ids=str,
)
def test_cancelled_and_lost_clips_leave_the_ranks_in_step(
    world_size: int, layout: dict[str, Any]
) -> None:
    config = dummy(world_size, steps=8, **layout)
    for rank in range(world_size):
        with Pipeline(config, fault=Damage("nan", rank, 1)) as pipeline:
            first, lost, cancelled, last = pipeline.submit(clips(1, 2, 3, 4))
            cancelled.cancel()
            found = hashes([first.result(), last.result()])
        with pytest.raises(NotFiniteError, match="not finite after step"):
            lost.result()
        assert found == plain_hashes(8, 1, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 3}, "needs an even number of ranks, got 3"),
        ({"cfg_parallel": 3}, "must be 1 or 2, got 3"),
        ({"replicas": 2}, "`replicas` is 2, and the number of pairs of ranks is 1"),
        ({"allow_mixed_devices": True}, "cannot be used with `allow_mixed_devices`"),
        ({"decode_ranks": 3}, "1 to 2, the number of ranks of a replica, got 3"),
        ({"decode_ranks": 0}, "`decode_ranks` must be 1 to 2, .* got 0"),
        (
            {"decode_ranks": 2, "cfg_parallel": 1, "decoders": 2},
            "must be 1, the number of ranks of a decoder",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(options: dict[str, Any], words: str) -> None:
    others = {
        name: options[name] for name in ("world_size", "allow_mixed_devices") if name in options
    }
    chosen = {name: value for name, value in options.items() if name not in others}
    with pytest.raises(RequestError, match=words):
        replace(
            dummy(2, steps=6),
            parallel=ParallelConfig(**layout_fields({"cfg_parallel": 2, **chosen})),
            **others,
        )


def test_old_names_of_a_layouts_fields_are_taken_with_a_warning() -> None:
    """`PipelineConfig` accepts its arguments and attributes of version 0.3, with a warning."""
    config = dummy(4, steps=8)
    with pytest.warns(DeprecationWarning, match="in place of replicas, cfg_parallel"):
        old = replace(config, replicas=2, cfg_parallel=2)
    chosen = ParallelConfig(data_parallel_size=2, cfg_parallel_size=2)
    assert old == replace(config, parallel=chosen)
    assert (old.replicas, old.cfg_parallel, old.decode_ranks) == (2, 2, None)  # type: ignore[attr-defined]


def test_what_a_model_cannot_share_is_refused(tmp_path: Path) -> None:
    config = config_of("5b", tmp_path)
    text, unguided = WanSampling(**WAN), WanSampling(**WAN, guidance_scale=1.0)
    with pytest.raises(RequestError, match="with these parameters the guidance is off"):
        resolve_config(replace(config, sampling=unguided))
    with pytest.raises(RequestError, match="`decode_ranks` 2 cannot divide the decode of"):
        resolve_config(replace(config, parallel=replace(PAIRED, decode_parallel_size=2)))
    with pytest.raises(RequestError, match="started for clips from text only"):
        RequestScheduler(*resolve_config(config)).resolve_request(
            replace(REQUESTS[0], sampling=replace(text, from_image=True))
        )
    chunks = svd_config(2, parallel=PAIRED)
    whole = replace(chunks, sampling=replace(chunks.sampling, decode_chunk_size=None))
    with pytest.raises(RequestError, match="a clip of 5 frames has only 1") as caught:
        resolve_config(replace(whole, parallel=replace(PAIRED, decode_parallel_size=2)))
    assert "`decode_ranks` 1 or fewer, or use a smaller `decode_chunk_size`" in caught.value.hint
    assert [
        resolve_config(each)[0].parallel.decode_parallel_size for each in (config, whole, chunks)
    ] == [1, 1, 2]


# --- one decode by several ranks ----------------------------------------------------------------


def svd_config(world_size: int, **changes: Any) -> PipelineConfig:
    """Return a configuration of SVD with five frames, which are decoded in chunks of two."""
    config = small_svd(1, steps=4)
    sampling = replace(config.sampling, num_frames=5, decode_chunk_size=2)
    return replace(config, sampling=sampling, world_size=world_size, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "parallel", "decodes"),
    [
        (2, PAIRED, {0: 2, 1: 2, 2: 1}),
        pytest.param(
            4,
            ParallelConfig(data_parallel_size=2, decode_parallel_size=2),
            {0: 2, 1: 2, 2: 1},
            marks=MORE,
        ),
        (3, ParallelConfig(split="balanced", decode_parallel_size=3), {0: 3, 1: 2, 2: 1}),
    ],
)
def test_as_many_ranks_as_a_clip_has_chunks_decode_the_bits_of_one(
    world_size: int, parallel: ParallelConfig, decodes: dict[int, int]
) -> None:
    config, found = svd_config(world_size, parallel=parallel), list[list[str]]()
    own = [replace(config.sampling, num_frames=frames) for frames in (5, 3, 2)]
    requests = [ClipRequest(seed=1, image=PHOTO, sampling=sampling) for sampling in own]
    alone = replace(config.parallel, decode_parallel_size=1)
    for one_or_several in (replace(config, parallel=alone), config):
        with Pipeline(one_or_several) as pipeline:
            found.append([result.metadata["frames_sha256"] for result in pipeline.run(requests)])
    assert found[0] == found[1]
    spans = [span for span in pipeline.trace.spans if span.action.kind is Kind.DECODE]
    assert Counter(span.action.clip for span in spans) == decodes


@pytest.mark.slow
def test_verify_compares_a_decode_by_several_ranks() -> None:
    config, _ = resolve_config(
        svd_config(3, parallel=ParallelConfig(split="alternating", decode_parallel_size=3))
    )
    result = verify(config, [ClipRequest(seed=seed, image=PHOTO) for seed in (1, 2, 3, 4)])
    assert result.bitwise
    assert {check.what for check in result.checks} == {"latent", "final_latent", "frames"}


# --- tiles of one decode by several ranks --------------------------------------------------------

#: Sampling parameters for clips with two tiles (Wan, LTX-Video) and with six (HunyuanVideo, which
#: also divides the frames into tiles).
TILED_WAN = WanSampling(**{**WAN, "num_inference_steps": 2, "height": 16, "width": 288})
TILED_LTX = LtxSampling(**{**LTX, "num_inference_steps": 2, "height": 32, "width": 544})
TILED_HUNYUAN = HunyuanVideoSampling(
    **{**WAN, "num_inference_steps": 2, "height": 16, "width": 288, "num_frames": 33}
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sampling", "parallel"),
    [
        pytest.param("wan", TILED_WAN, PAIRED, marks=pytest.mark.full),
        ("ltx", TILED_LTX, ParallelConfig(decode_parallel_size=2)),
        pytest.param(
            *("hunyuan_video", TILED_HUNYUAN, ParallelConfig(decode_parallel_size=2)),
            marks=pytest.mark.full,
        ),
    ],
)
def test_tiles_of_two_ranks_give_the_bits_of_diffusers_with_tiles(
    tmp_path: Path, family: str, sampling: Any, parallel: ParallelConfig
) -> None:
    save_tiny(family, tmp_path)
    model = ModelConfig(name=str(tmp_path), vae_tiling=True)
    config, _ = resolve_config(
        PipelineConfig(world_size=2, model=model, sampling=sampling, parallel=parallel)
    )
    assert config.parallel.decode_parallel_size == 2
    result = verify(config, REQUESTS[::2])
    assert result.bitwise
    assert "frames" in {check.what for check in result.checks}


def test_a_clip_of_one_tile_is_decoded_by_one_rank(tmp_path: Path) -> None:
    save_tiny_wan(tmp_path)
    model = ModelConfig(name=str(tmp_path), vae_tiling=True)
    config = PipelineConfig(world_size=2, model=model, sampling=WanSampling(**WAN), parallel=PAIRED)
    assert resolve_config(config)[0].parallel.decode_parallel_size == 1
    two = replace(config, parallel=replace(PAIRED, decode_parallel_size=2))
    with pytest.raises(RequestError, match=r"needs 2 tiles, but .* only 1") as caught:
        resolve_config(two)
    assert caught.value.details == {"decode_ranks": 2, "tiles": 1}
    untiled = replace(two, model=replace(model, vae_tiling=False))
    with pytest.raises(RequestError, match="cannot divide the decode of") as caught:
        resolve_config(untiled)
    assert "use `vae_tiling`, whose tiles are decoded on their own" in caught.value.hint
